"""A test that a loop computes the same numbers overlapped as it does serially.

The engine checks the declarations of tasks through torch's dispatch, which does not see Python
values such as a counter, an object's attribute or a file. ``assert_same_numbers`` compares results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch

from swpipe._values.generators import default_generators, set_default_generators
from swpipe.core.context import IterContext
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.loops.overlapping import OverlappedLoop, overlap
from swpipe.pipeline import SWPipeline
from swpipe.testing.compared_values import copies, first_unequal, leaves_by_name


@dataclass(frozen=True)
class Loop:
    """A new loop with its own models, optimizers, loader and all other values that it changes.

    Attributes:
        loader: See ``overlap``.
        tasks: See ``overlap``.
        state: Returns what is compared after each iteration, besides the contexts: models,
            optimizers, and nests of them, of tensors, arrays and plain values. Nothing by default.
        body: The function that the loop calls with each context after the tasks.
        pull_ahead: See ``overlap``.
        context: See ``overlap``.
        plan: The plan of the tasks, for ``first_difference``; None for serially.
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
        device: See ``overlap``.

    Raises:
        AssertionError: Names the first iteration, attribute and element that differ; of an
            iteration that one run has not, everything differs.
    """
    where = resolve(device)
    begin = default_generators(where)
    loop = make_loop()
    # The serial run ends before the other one begins: both may use the default generators.
    with pipeline_of(loop, tasks_of(loop), device=device) as pipe:
        batches = islice(loop.loader, iterations)
        expected = [*_results(loop, map(pipe.run_one_serial_iter, batches))]
    set_default_generators(where, begin)
    loop = make_loop()
    with overlapped(loop, device=device) as contexts:
        results = _results(loop, islice(contexts, iterations))
        # A loader that counts its passes may have more batches in the second one, or fewer.
        nothing: dict[str, Any] = {}
        for number, pair in enumerate(zip_longest(expected, results, fillvalue=nothing)):
            if unequal := first_unequal(*pair):
                name, element, plain, ahead = unequal
                raise AssertionError(
                    f"iteration {number}: {name}{[*element] or ''} differs: plainly "
                    f"{shown(plain)}, overlapped {shown(ahead)}. A pure task or the loader, which "
                    "run ahead, uses what the loop changes, or changes what the loop uses"
                )


def overlapped(loop: Loop, **options: Any) -> OverlappedLoop[Any]:
    """Return a loop's contexts, with the loader and its pure tasks ahead."""
    return overlap(
        loop.loader, loop.tasks, pull_ahead=loop.pull_ahead, context=loop.context, **options
    )


def pipeline_of(loop: Loop, tasks: Sequence[PipelineTask], device: Any = None) -> SWPipeline[Any]:
    """Return a pipeline of a loop's tasks under its plan, or serially; it checks no effects."""
    plan = PipelinePlan.serial(tasks) if loop.plan is None else loop.plan
    return SWPipeline(plan, tasks, device=device, context=loop.context, check_effects=False)


def tasks_of(loop: Loop) -> list[PipelineTask]:
    """Return a loop's tasks; a function becomes an undeclared task."""
    return [t if isinstance(t, PipelineTask) else task(t) for t in refs_in(loop.tasks)]


def _results(loop: Loop, contexts: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Run the loop's body, and yield copies of what the context and the state hold, by name."""
    for ctx in contexts:
        loop.body(ctx)
        values = {f"ctx.{name}": value for name, value in vars(ctx).items()}
        # The next iteration may change these values in place.
        yield copies(leaves_by_name({**values, "state()": loop.state()}))
