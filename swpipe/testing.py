"""For tests of your own: whether a loop trains the same numbers overlapped as plainly.

What a task says of itself is checked where torch's dispatch sees it, and that ends at Python
values: a counter, an object's attribute, a file. ``assert_same_numbers`` compares what comes out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.generators import default_generators, set_default_generators
from swpipe._tensors.containers import LEAF, TENSOR, kind_of
from swpipe._tensors.pytree import Node, parts_of
from swpipe.core.context import IterContext
from swpipe.core.messages import shown
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.loops.overlapping import overlap

__all__ = ["Loop", "assert_same_numbers"]


@dataclass(frozen=True)
class Loop:
    """A loop, made anew: its models, its optimizers, its loader and what else it changes.

    Attributes:
        loader: As for ``overlap``.
        tasks: As for ``overlap``.
        state: Returns what is compared after each iteration, besides the contexts: models,
            optimizers, and nests of them, of tensors, arrays and plain values.
        body: What the loop does with each context after the tasks.
        pull_ahead: As for ``overlap``.
        context: As for ``overlap``.
    """

    loader: Iterable[Any]
    tasks: Iterable[PipelineTask | Callable[[Any], None]]
    state: Callable[[], Any]
    body: Callable[[Any], object] = id
    pull_ahead: bool | None = None
    context: type[Any] = IterContext


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
    expected = [*_plain(make_loop(), iterations, where)]
    set_default_generators(where, begin)
    loop, number = make_loop(), -1
    with overlap(
        loop.loader,
        loop.tasks,
        device=device,
        pull_ahead=loop.pull_ahead,
        context=loop.context,
    ) as contexts:
        for number, ctx in zip(range(iterations), contexts, strict=False):
            loop.body(ctx)
            if number >= len(expected):
                raise AssertionError(f"{len(expected)} iterations plainly, and more overlapped")
            _compare(number, expected[number], _contents(loop, ctx))
    if number + 1 < len(expected):
        raise AssertionError(f"{len(expected)} iterations plainly, and {number + 1} overlapped")


def _plain(loop: Loop, iterations: int, device: Device) -> Iterator[dict[str, Any]]:
    tasks = [t if isinstance(t, PipelineTask) else task(t) for t in refs_in(loop.tasks)]
    seeds = TaskSeeds(None, device)
    for number, batch in zip(range(iterations), loop.loader, strict=False):
        ctx = loop.context(batch, number)
        for each in tasks:
            if each.random:
                with seeds.seeded(each.name, number):
                    each(ctx)
            else:
                each(ctx)
        loop.body(ctx)
        yield {name: _copied(leaf) for name, leaf in _contents(loop, ctx).items()}


def _contents(loop: Loop, ctx: Any) -> dict[str, Any]:
    """What is compared, by its name."""
    values = {f"ctx.{name}": value for name, value in vars(ctx).items()}
    found: dict[str, Any] = {}
    for name, value in {**values, "state()": loop.state()}.items():
        _collect(name, value, found, set())
    return found


def _collect(name: str, value: Any, found: dict[str, Any], outer: set[int]) -> None:
    kind = kind_of(type(value))
    if kind is LEAF and hasattr(value, "state_dict") and not isinstance(value, type):
        _collect(name, value.state_dict(), found, outer)
    elif kind is LEAF or kind is TENSOR:
        found[name] = value
    elif id(value) not in outer:  # a container may contain itself
        node = Node.of(value)
        for key, child in zip(node.keys or range(len(node.children)), node.children, strict=True):
            _collect(f"{name}[{key!r}]", child, found, outer | {id(value)})


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if _is_compared(leaf) else leaf


def _is_compared(leaf: Any) -> bool:
    own: Any = type(leaf).__eq__
    return own is not object.__eq__ and not callable(leaf)


def _compare(iteration: int, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise at the first difference."""
    for name in {**expected, **found}:
        if name not in found or name not in expected:
            side = "plain" if name in expected else "overlapped"
            raise AssertionError(f"iteration {iteration}: only the {side} loop has {name}. {_WHY}")
        plain, ahead = expected[name], found[name]
        if isinstance(plain, Tensor) and isinstance(ahead, Tensor):
            place = _first_different(plain, ahead)
            if place:
                plain, ahead = plain[place].item(), ahead[place].item()
        else:
            place = None if _equal(plain, ahead) else ()
        if place is not None:
            raise AssertionError(
                f"iteration {iteration}: {name}{[*place] or ''} differs: plainly {shown(plain)}, "
                f"overlapped {shown(ahead)}. {_WHY}"
            )


_WHY = (
    "A pure task or the loader, which run ahead, uses what the loop changes, or changes what the "
    "loop uses"
)


def _first_different(plain: Tensor, ahead: Tensor) -> tuple[int, ...] | None:
    """Where two tensors differ; () as a whole, None nowhere."""
    if plain.shape != ahead.shape or plain.layout != ahead.layout:
        return ()
    for one, other in zip(parts_of(plain), parts_of(ahead), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return ()
        different = (_bytes(one) != _bytes(other)).any(1).nonzero()
        if len(different):
            place = torch.unravel_index(different[0, 0], one.shape)
            return tuple(int(number) for number in place) if one is plain else ()
    return None


def _bytes(tensor: Tensor) -> Tensor:
    """One row for each element: as bytes NaN equals NaN, and 0.0 does not equal -0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1, 1).contiguous()
    return flat.view(torch.uint8)


def _equal(plain: Any, ahead: Any) -> bool:
    if type(plain) is not type(ahead):
        return False
    if hasattr(plain, "tobytes") and hasattr(plain, "dtype"):  # numpy's
        kinds = [(one.dtype, one.shape, one.tobytes()) for one in (plain, ahead)]
        return bool(kinds[0] == kinds[1])
    if isinstance(plain, float | complex):
        return repr(plain) == repr(ahead)
    return not _is_compared(plain) or bool(plain == ahead)
