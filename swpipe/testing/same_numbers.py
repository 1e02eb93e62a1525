"""A test that a loop computes the same numbers overlapped as it does serially.

The engine checks the declarations of tasks through torch's dispatch, which does not see Python
values such as a counter, an object's attribute or a file. ``assert_same_numbers`` compares results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swpipe._engine.randomness import TaskSeeds
from swpipe._values.generators import default_generators, set_default_generators
from swpipe.core.context import IterContext
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.loops.overlapping import overlap
from swpipe.testing.compared_values import ABSENT, copies, first_unequal, leaves_by_name


@dataclass(frozen=True)
class Loop:
    """A new loop with its own models, optimizers, loader and all other values that it changes.

    Attributes:
        loader: As for ``overlap``.
        tasks: As for ``overlap``.
        state: Returns what is compared after each iteration, besides the contexts: models,
            optimizers, and nests of them, of tensors, arrays and plain values. Nothing by default.
        body: What the loop does with each context after the tasks.
        pull_ahead: As for ``overlap``.
        context: As for ``overlap``.
        plan: For ``first_difference``: the plan that the tasks run under; None for serially.
    """

    loader: Iterable[Any]
    tasks: Iterable[PipelineTask | Callable[[Any], None]]
    state: Callable[[], Any] = list
    body: Callable[[Any], object] = id
    pull_ahead: bool | None = None
    context: type[Any] = IterContext
    plan: PipelinePlan | None = None


def assert_same_numbers(
    make_loop: Callable[[], Loop],
    *,
    iterations: int = 50,
    device: Device | torch.device | str | None = None,
) -> None:
    """Run a loop plainly, then overlapped, and compare all bits after each iteration.

    In a test::

        def make_loop():
            model = Model()
            optimizer = torch.optim.Adam(model.parameters())

            @swpipe.task(pure=True)
            def decode(ctx):
                ctx.x = tokenize(ctx.batch)

            def train(ctx):
                ctx.loss = model(ctx.x)
                ctx.loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return Loop(loader(), [decode, train], state=lambda: [model, optimizer])

        def test_overlapping_changes_nothing():
            assert_same_numbers(make_loop)

    Both runs begin with the same states of the default random generators, and both use one pass
    over the loader. What the plain run leaves after each iteration is copied: use a small model.
    Tensors, arrays and floats are the same if all bits are, other objects if they are ``==``;
    functions, and objects whose class defines no ``==``, are not compared.

    Args:
        make_loop: Called twice; makes everything that the loop changes.
        iterations: How many to run at most.
        device: As for ``overlap``.

    Raises:
        AssertionError: Names the first iteration, attribute and element that differ.
    """
    where = resolve(device)
    begin = default_generators(where)
    # The serial run ends before the other one begins: both may use the default generators.
    expected = [*_plain(make_loop(), iterations, where)]
    set_default_generators(where, begin)
    loop = make_loop()
    number = -1  # the last iteration, for a loader without batches
    with overlap(
        loop.loader,
        loop.tasks,
        device=device,
        pull_ahead=loop.pull_ahead,
        context=loop.context,
    ) as contexts:
        # The range comes first: zip pulls no context that it does not hand out.
        for number, ctx in zip(range(iterations), contexts, strict=False):
            loop.body(ctx)
            # A loader that counts its passes may have more batches in the second one.
            if number >= len(expected):
                raise AssertionError(
                    f"the plain loop has {len(expected)} iterations, the overlapped loop has more"
                )
            _compare(number, expected[number], _contents(loop, ctx))
    if number + 1 < len(expected):
        raise AssertionError(
            f"the plain loop has {len(expected)} iterations, the overlapped loop has {number + 1}"
        )


def tasks_of(loop: Loop) -> list[PipelineTask]:
    """Return a loop's tasks; a function becomes an undeclared task."""
    return [t if isinstance(t, PipelineTask) else task(t) for t in refs_in(loop.tasks)]


def _plain(loop: Loop, iterations: int, device: Device) -> Iterator[dict[str, Any]]:
    """Run a loop serially, and yield copies of what each iteration leaves."""
    tasks = tasks_of(loop)
    # The pipeline seeds random tasks by name and iteration; the serial run has to do the same.
    seeds = TaskSeeds(None, device)
    # The range comes first, so that no batch is pulled in vain.
    for number, batch in zip(range(iterations), loop.loader, strict=False):
        ctx = loop.context(batch, number)
        for each in tasks:
            if each.random:
                with seeds.seeded(each.name, number):
                    each(ctx)
            else:
                each(ctx)
        loop.body(ctx)
        # The next iteration may change these values in place.
        yield copies(_contents(loop, ctx))


def _contents(loop: Loop, ctx: Any) -> dict[str, Any]:
    """Return the leaves to compare, by name: those of the context and of the state."""
    values = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    return leaves_by_name({**values, "state()": loop.state()})


def _compare(iteration: int, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raise an AssertionError at the first difference."""
    unequal = first_unequal(expected, actual)
    if unequal is None:
        return
    name, element, plain, ahead = unequal
    if plain is ABSENT or ahead is ABSENT:
        side = "overlapped" if plain is ABSENT else "plain"
        raise AssertionError(f"iteration {iteration}: only the {side} loop has {name}. {_WHY}")
    raise AssertionError(
        f"iteration {iteration}: {name}{[*element] or ''} differs: plainly {shown(plain)}, "
        f"overlapped {shown(ahead)}. {_WHY}"
    )


_WHY = (
    "A pure task or the loader, which run ahead, uses what the loop changes, or changes what the "
    "loop uses"
)
