"""A batch that the loader keeps, and that a task ahead changes in place, is never read as data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import swpipe
from swpipe import overlap

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
    """A pure task that changes one batch in place when the test allows it."""

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


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_loop_refuses_to_give_it_again(name: str) -> None:
    """It would be modified twice."""
    make, change = CHANGES[name]
    task = Changing(2, change)
    loop = overlap([make(number + 1) for number in range(6)], [task.task()])
    for _ in loop:
        task.may_begin.set()
        assert task.changed.wait(30)
        state = loop.state_dict()
        break
    with loop, pytest.raises(RuntimeError, match="modified batches that were dropped"):
        loop.load_state_dict(state)
