"""A loader that takes as long as training: pulled ahead by swpipe, by DataLoader, and by spdl.

The loader itself reads, inflates and makes features, as a dataset does. In the sleeping loop it
sleeps for as long as training does: no way to run it is faster than twice the plain loop.

A thread that pulls, and a queue that holds one batch, are what one writes by hand. Over these an
iteration may take 30 us more where there is nothing to do, and nothing where both cores are busy.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import swpipe
from bench.data_bound import TRAIN, Loop, absent, files, ms_per_batch, run_spdl
from bench.measure import Row, compared, interleaved, tolerated
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline

SLEEP_S = 0.005


class Features(Dataset[torch.Tensor]):
    """What ``loop.feed`` makes of each path."""

    def __init__(self, loop: Loop, paths: Sequence[Path]) -> None:
        self._feed, self._paths = loop.feed, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        x: torch.Tensor = self._feed(self._paths[index]).x
        return x


def take(ctx: Any) -> None:
    """The batch is the input."""
    ctx.x = ctx.batch


def _tasks(loop: Loop) -> list[PipelineTask]:
    return [PipelineTask("take", take), *(task for task in loop.tasks if task.name in TRAIN)]


def _features(loop: Loop, paths: Iterable[Path]) -> Iterator[torch.Tensor]:
    return (loop.feed(path).x for path in paths)


def run_plain(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """No overlap."""
    for i, x in enumerate(_features(loop, paths)):
        ctx = IterContext(x, i)
        take(ctx)
        loop.train(ctx)
        yield ctx


def run_pull_group(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """All tasks on the caller's thread, the loader on one of its own."""
    tasks = _tasks(loop)
    plan = replace(PipelinePlan.serial(tasks), pull_group="loader", pipeline_depth=None)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        yield from pipe.iterate(_features(loop, paths))


def run_overlap(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """One call."""
    loader, tasks = _features(loop, paths), _tasks(loop)
    with swpipe.overlap(loader, tasks, pull_ahead=True, device="cpu") as overlapped:
        yield from overlapped


def pulled_by_hand(loader: Iterable[Any], most: int = 1) -> Iterator[Any]:
    """By a thread, through a queue of ``most`` batches; the thread ends where the loop is left."""
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


def run_by_hand(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """No swpipe."""
    for i, x in enumerate(pulled_by_hand(_features(loop, paths))):
        ctx = IterContext(x, i)
        take(ctx)
        loop.train(ctx)
        yield ctx


def empty_us(overlapped: bool, batches: int = 5000) -> float:
    """An iteration of a loop that does nothing."""
    loader = (torch.ones(4) for _ in range(batches))
    begin = time.perf_counter()
    if overlapped:
        task = PipelineTask("nothing", lambda ctx: None)
        with swpipe.overlap(loader, [task], pull_ahead=True, device="cpu") as loop:
            done = sum(1 for _ in loop)
    else:
        done = sum(1 for _ in pulled_by_hand(loader))
    assert done == batches
    return (time.perf_counter() - begin) / batches * 1e6


def run_worker(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """``DataLoader(num_workers=1)``: another process."""
    dataset = Features(loop, list(paths))
    for i, x in enumerate(DataLoader(dataset, batch_size=None, num_workers=1)):
        ctx = IterContext(x, i)
        take(ctx)
        loop.train(ctx)
        yield ctx


def sleeping_s(pull_group: str | None, batches: int = 60) -> float:
    """Seconds for loader and task that both sleep."""

    def loader() -> Iterator[int]:
        for i in range(batches):
            time.sleep(SLEEP_S)
            yield i

    tasks = [PipelineTask("train", lambda ctx: time.sleep(SLEEP_S))]
    plan = replace(PipelinePlan.serial(tasks), pull_group=pull_group, pipeline_depth=None)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        return pipe.run(loader()).seconds


def rows(rounds: int = 7, batches: int = 60) -> list[Row]:
    """Rows for the pull group and for ``overlap``, beside each other way to run the loop."""
    runners = {
        "plain loop": run_plain,
        "thread and queue": run_by_hand,
        "DataLoader, 1 worker": run_worker,
        **({} if absent("spdl") else {"spdl": run_spdl}),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        pulled, overlapped, *others = interleaved(
            rounds,
            *(
                lambda runner=runner: ms_per_batch(runner, paths, batches)
                for runner in (run_pull_group, run_overlap, *runners.values())
            ),
        )
    found = []
    for name, times in zip(runners, others, strict=True):
        bar = {"plain loop": None, "thread and queue": 1 / 0.97}.get(name, 1 / 0.9)
        found.append(compared(f"pull_group, beside {name}", pulled, times, "ms", name, bar))
        found.append(compared(f"overlap, beside {name}", overlapped, times, "ms", name, bar))
    ahead, serial = interleaved(
        rounds, lambda: 1e3 * sleeping_s("loader"), lambda: 1e3 * sleeping_s(None)
    )
    ours, by_hand = interleaved(rounds, lambda: empty_us(True), lambda: empty_us(False))
    over = median(a - b for a, b in zip(ours, by_hand, strict=True))
    found.append(tolerated("overlap of an empty loop, over thread and queue", over, 30, "us"))
    found.append(compared("sleeping loader", ahead, serial, "ms", "serial", 1 / 1.7))
    if absent("spdl"):
        found.append(Row("beside spdl", "skipped: not installed (make bench installs it)"))
    return found
