"""The cost that a loop over a loader adds to a plain loop.

Three cases: the loader runs serially with the body, with a bar of 1.01; a pass has four batches,
with a bar of 1 ms more; the body is empty, with a bar of 40 us per batch.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import swpipe
from bench.measure import Row, compared, interleaved, tolerated

WORK_S = 0.005


class _Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


def _spin() -> None:
    end = time.perf_counter() + WORK_S
    while time.perf_counter() < end:
        pass


def _drawing(batches: int) -> Iterator[float]:
    for _ in range(batches):
        _spin()
        yield random.random()


def _seconds(loop: Iterable[Any], body: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in loop:
        body()
    return time.perf_counter() - begin


def _in_turn(over: Callable[[Any], Any], batches: int) -> float:
    """Return the ms per batch of a loop whose loader and body both draw."""

    def body() -> None:
        random.random()
        _spin()

    return _seconds(over(_drawing(batches)), body) / batches * 1e3


SHORT: dict[str, Callable[[], Any]] = {
    "a DataLoader over a dataset": lambda: DataLoader(_Ones(), batch_size=4),
    "a DataLoader over tensors": lambda: DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=4),
    "an iterable": lambda: _Four(),
    "a list": lambda: [1, 2, 3, 4],
}


class _Four:
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3, 4])


def rows(rounds: int = 15, batches: int = 60, empty: int = 4000) -> list[Row]:
    """Return the rows of all cases, measured alternately with the plain loop."""
    warnings.filterwarnings("ignore", "the loop, a task or its body, draws")
    plain, ours = interleaved(
        rounds, lambda: _in_turn(iter, batches), lambda: _in_turn(swpipe.ahead, batches)
    )
    found = [compared("in turn, beside the plain loop", ours, plain, "ms", "plain loop", 1.01)]
    for name, make in SHORT.items():
        more = _more_in_a_pass(make(), 10 * rounds)
        found.append(tolerated(f"a pass of 4 batches of {name}, more", more, 1, "ms"))
    for draws in (None, False):
        (us,) = interleaved(
            rounds,
            lambda: _seconds(swpipe.ahead(_empty(empty), draws=draws), bool) / empty * 1e6,  # noqa: B023
        )
        name = f"an empty body, draws={draws}, a batch"
        found.append(tolerated(name, median(us), 40, "us"))
    return found


def _more_in_a_pass(loader: Any, rounds: int) -> float:
    """Return by how many ms a pass takes longer than in a plain loop."""
    loop = swpipe.ahead(loader)
    _seconds(loop, bool)  # the first pass
    ours, plain = interleaved(rounds, lambda: _seconds(loop, bool), lambda: _seconds(loader, bool))
    return median(a - b for a, b in zip(ours, plain, strict=True)) * 1e3


def _empty(batches: int) -> Iterator[torch.Tensor]:
    return (torch.ones(4) for _ in range(batches))
