"""What tasks ahead change in place, of batches that the loader keeps, is never taken for data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import swpipe
from swpipe import overlap
from swpipe.loops import OverlappedLoop
from swpipe.loops.batch_memory import Contents, has_checksums
from tests.loops.ordinary_loops import record_of

CHANGES: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "longer": (lambda n: [n, n + 1], lambda batch: batch.append(batch[0])),
    "doubled": (lambda n: [n, n + 1], lambda batch: batch.__setitem__(0, 2 * batch[0])),
    "reordered": (lambda n: [n, n + 1], lambda batch: batch.reverse()),
    "moved": (lambda n: [[n], [n + 1]], lambda batch: batch[0].append(batch[1].pop())),
    "replaced": (lambda n: [torch.ones(2) * n], lambda batch: batch.append(batch.pop() * 2)),
    "renamed": (lambda n: {"x": torch.ones(n)}, lambda batch: batch.update(y=batch.pop("x"))),
    "array": (
        lambda n: {"x": np.arange(4.0) + n},
        lambda batch: np.negative(batch["x"], batch["x"]),
    ),
    "tensor": (lambda n: (torch.ones(2) * n, "name"), lambda batch: batch[0].neg_()),
}


class Changing:
    """A pure task that changes one batch in place, when it may."""

    def __init__(self, number: int, change: Callable[[Any], object]) -> None:
        self.may_begin = threading.Event()
        self.changed = threading.Event()
        self._number = number
        self._change = change

    def task(self) -> swpipe.PipelineTask:
        def use(ctx: Any) -> None:
            if ctx.iter_idx:
                assert self.may_begin.wait(30)
            if ctx.iter_idx == self._number:
                self._change(ctx.batch)
                self.changed.set()

        return swpipe.task(pure=True)(use)


def left(loader: Any, task: Changing, *, early: bool) -> tuple[OverlappedLoop[Any], Any]:
    """Return a loop that was left in the body of its first batch, and its state there.

    Args:
        loader: Its loader.
        task: Changes a batch before the loop is left.
        early: Save the state before that; the task has begun with no batch ahead then.
    """
    loop = overlap(loader, [task.task()])
    for _ in loop:
        if early:
            state = loop.state_dict()
        task.may_begin.set()
        assert task.changed.wait(30)
        if not early:
            state = loop.state_dict()
        break
    return loop, state


def nothing(ctx: Any) -> None:
    """Changes nothing."""


def resumed(loader: Any, state: Any, **options: Any) -> Iterator[Any]:
    """Yield what another loop over the loader gives, from the state on."""
    with overlap(loader, [swpipe.task(pure=True)(nothing)]) as loop:
        loop.load_state_dict(state, **options)
        for ctx in loop:
            yield ctx.batch


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_another_loop_refuses_a_batch_that_was_changed_ahead(name: str, early: bool) -> None:
    """Also where it was pulled and changed after the state was saved; the batch before is given."""
    make, change = CHANGES[name]
    loader = [make(number + 1) for number in range(6)]
    last = 3 if early else 2
    loop, state = left(loader, Changing(last, change), early=early)
    with loop:
        batches = resumed(loader, state)
        assert len([*islice(batches, last - 1)]) == last - 1
        words = rf"batch {last + 1} of the pass is not what it was .*\(list\)"
        with pytest.raises(ValueError, match=words):
            next(batches)


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_loop_refuses_to_give_it_again(name: str) -> None:
    """It would be modified twice."""
    make, change = CHANGES[name]
    loop, state = left([make(number + 1) for number in range(6)], Changing(2, change), early=False)
    with loop, pytest.raises(RuntimeError, match="modified batches that were dropped"):
        loop.load_state_dict(state)


@pytest.mark.parametrize("name", CHANGES)
def test_equal_data_is_taken_and_so_is_other_data_that_does_not_matter(name: str) -> None:
    """A loader that is made anew has the same batches; ``check=False`` takes the changed ones."""
    make, change = CHANGES[name]
    loader = [make(number + 1) for number in range(6)]
    loop, state = left(loader, Changing(2, change), early=False)
    with loop:
        assert len([*resumed([make(number + 1) for number in range(6)], state)]) == 5
        assert len([*resumed(loader, state, check=False)]) == 5


class Lazy:
    """Has a ``record_stream`` method, and computes an attribute when it is read."""

    def __init__(self, number: int) -> None:
        self.values = torch.ones(2) * number
        self._sum: torch.Tensor | None = None

    def record_stream(self, stream: Any) -> None:
        self.values.record_stream(stream)

    def compute(self) -> None:
        self._sum = self.values.sum()


def test_an_attribute_that_is_computed_when_it_is_read_is_no_change() -> None:
    """As those of a KeyedJaggedTensor; its tensors are compared."""
    loader = [Lazy(number) for number in range(6)]
    loop, state = left(loader, Changing(2, Lazy.compute), early=False)
    with loop:
        assert len([*resumed(loader, state)]) == 5
        loader[2].values.neg_()
        with pytest.raises(ValueError, match="batch 3 of the pass is not what it was"):
            [*resumed(loader, state)]


def test_a_state_has_what_a_list_gives_after_it_was_saved() -> None:
    """A batch that is not yet pulled may be changed before the pass is left."""
    loader = [[number] for number in range(6)]
    saved = record_of(loader, most=3).state_dict(1, check=True)["coming"]
    assert saved == [Contents(batch).checksums for batch in loader[1:4]]
    loader[2].append(0)
    assert [has_checksums(*both) for both in zip(loader[1:4], saved, strict=True)] == [
        True,
        False,
        True,
    ]
