"""A loader that takes as long as training, pulled ahead by swpipe, by a thread, and by DataLoader.

The loader reads, inflates and computes features, as a dataset does. The usual manual solution is a
thread that pulls and a queue of one batch. The thread makes the next batch while the queue is full,
so both ways are two batches ahead of the body. Compared with a thread and a queue, an iteration may
take 30 us more if there is no work, and 3% more if both cores are busy.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import swpipe
from bench.data_bound import files, loop_tasks
from bench.measure import Row, compared, interleaved, tolerated
from swpipe import IterContext, PipelineTask

WARM_UP = 25  # the first 16 iterations are watched


class Loop(Dataset[Tensor]):
    """The features of each file as a dataset, and a model to train on them, always the same one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.tasks = loop_tasks()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        ctx = IterContext(self.paths[index], index)
        for task in self.tasks[:3]:
            task.fn(ctx)
        x: Tensor = ctx.x
        return x

    def features(self) -> Iterator[Tensor]:
        """Return an iterator over the features, computed in this process."""
        return (self[index] for index in range(len(self)))

    def train(self, ctx: IterContext) -> None:
        """Train on the batch of a context, and set its loss."""
        ctx.x = ctx.batch
        for task in self.tasks[3:]:
            task.fn(ctx)


def pulled_by_hand(loader: Iterable[Any], most: int = 1) -> Iterator[Any]:
    """Yield batches that a thread pulls through a queue of ``most``; the thread ends with it."""
    batches: queue.Queue[Any] = queue.Queue(most)
    left = threading.Event()

    def pull() -> None:
        for batch in loader:
            batches.put(batch)
            if left.is_set():
                return
        batches.put(None)

    thread = threading.Thread(target=pull, daemon=True)
    thread.start()
    try:
        while (batch := batches.get()) is not None:
            yield batch
    finally:
        left.set()
        with suppress(queue.Empty):
            batches.get_nowait()  # for a put that waits
        thread.join()


def over(loop: Loop, batches: Iterable[Tensor]) -> Iterator[IterContext]:
    """Train on each batch in a plain loop."""
    for number, batch in enumerate(batches):
        ctx = IterContext(batch, number)
        loop.train(ctx)
        yield ctx


def overlapped(loop: Loop) -> Iterator[IterContext]:
    """Train in a loop under ``swpipe.overlap``."""
    with swpipe.overlap(loop.features(), [loop.train], pull_ahead=True, device="cpu") as contexts:
        yield from contexts


Run = Callable[[Loop], Iterator[IterContext]]

OTHERS: dict[str, tuple[Run, float | None]] = {
    "plain loop": (lambda loop: over(loop, loop.features()), None),
    "thread and queue": (lambda loop: over(loop, pulled_by_hand(loop.features())), 1 / 0.97),
    "DataLoader, 1 worker": (
        lambda loop: over(loop, DataLoader(loop, batch_size=None, num_workers=1)),
        1 / 0.9,
    ),
}
"""Other ways to load, with the bars of ``overlap`` compared with them."""


def ms_per_batch(run: Run, paths: Sequence[Path], batches: int) -> float:
    """Return the time per batch in the steady state, in ms."""
    ahead = 2
    many = [paths[i % len(paths)] for i in range(WARM_UP + batches + ahead)]
    with closing(run(Loop(many))) as contexts:  # type: ignore[type-var]  # all are generators
        for _ in islice(contexts, WARM_UP):
            pass
        begin = time.perf_counter()
        for _ in islice(contexts, batches):
            pass
        return (time.perf_counter() - begin) / batches * 1e3


def empty_us(by_swpipe: bool, batches: int = 5000) -> float:
    """Return the time of an iteration without work, in us."""
    loader = (torch.ones(4) for _ in range(batches))
    begin = time.perf_counter()
    if by_swpipe:
        task = PipelineTask("nothing", lambda ctx: None)
        with swpipe.overlap(loader, [task], pull_ahead=True, device="cpu") as loop:
            done = sum(1 for _ in loop)
    else:
        done = sum(1 for _ in pulled_by_hand(loader))
    assert done == batches
    return (time.perf_counter() - begin) / batches * 1e6


def rows(rounds: int = 7, batches: int = 60) -> list[Row]:
    """Compare ``overlap`` with each other way to run the loop, and with a thread without work."""
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        runs = overlapped, *(run for run, _ in OTHERS.values())
        ours, *others = interleaved(
            rounds, *(partial(ms_per_batch, run, paths, batches) for run in runs)
        )
    found = [
        compared(f"overlap, beside {name}", ours, times, "ms", name, bar)
        for (name, (_, bar)), times in zip(OTHERS.items(), others, strict=True)
    ]
    both = interleaved(rounds, lambda: empty_us(True), lambda: empty_us(False))
    more = median(a - b for a, b in zip(*both, strict=True))
    return [*found, tolerated("overlap of an empty loop, over thread and queue", more, 30, "us")]
