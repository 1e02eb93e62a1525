"""For tests of your own: whether a loop trains the same numbers overlapped as plainly.

What a task says of itself is checked where torch's dispatch sees it, and that ends at Python
values: a counter, an object's attribute, a file. ``assert_same_numbers`` compares what comes out.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.default_generators import default_generators, set_default_generators
from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.loops.overlap import overlap

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
    objects whose class defines no ``==`` are passed over.

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
    found = dict(_leaves("ctx", vars(ctx), lambda path: f".{path[0].key}{_at(path[1:])}"))
    return found | dict(_leaves("state()", loop.state(), _at))


_at = pytree.keystr


def _leaves(name: str, value: Any, shown: Callable[[Any], str]) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_leaves_with_path(value):
        if hasattr(leaf, "state_dict"):
            yield from _leaves(name + shown(path), leaf.state_dict(), _at)
        else:
            yield name + shown(path), leaf


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if _has_equality(leaf) else leaf


def _has_equality(leaf: Any) -> bool:
    return type(leaf).__eq__ is not object.__eq__


def _compare(iteration: int, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for (name, plain), (other, ahead) in zip_longest(
        expected.items(), found.items(), fillvalue=("", "nothing")
    ):
        where = f"iteration {iteration}: {name or other}"
        if name != other:
            raise AssertionError(f"{where} is {name and 'not '}there in the overlapped loop alone")
        if isinstance(plain, Tensor) and isinstance(ahead, Tensor):
            _compare_tensors(where, plain, ahead)
        elif not _equal(plain, ahead):
            raise AssertionError(f"{where} is {plain!r} plainly, and {ahead!r} overlapped")


def _compare_tensors(where: str, plain: Tensor, ahead: Tensor) -> None:
    kinds = [(one.dtype, tuple(one.shape), one.layout) for one in (plain, ahead)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"{where} is {kinds[0]} plainly, and {kinds[1]} overlapped")
    
