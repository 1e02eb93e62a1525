"""A loop under ``overlap`` beside a thread and a queue of one batch, written by hand."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import nn

import swpipe
from swpipe import IterContext, PipelineTask
from tests.bench.data_bound import TRAIN, Loop, files, ms_per_batch
from tests.bench.measure import Row, compared, interleaved, tolerated

ITERATIONS = 3_000
MOST_US = 30
"""What an iteration may cost more than by hand."""

TABLE_ROWS = 3_800_000
"""Of 64 numbers each: 0.9 GiB."""

MOST_MS, MOST_MIB = 100, 50
"""How much later the first batch may come, and how much more memory a loop over the table needs."""

_END = object()


def by_hand(loader: Iterable[Any], prepare: Callable[[Any], None]) -> Iterator[IterContext]:
    """Contexts of which a thread pulls the batch and prepares it, one ahead."""
    ready: Queue[Any] = Queue(1)

    def work() -> None:
        for i, batch in enumerate(loader):
            ctx = IterContext(batch, i)
            prepare(ctx)
            ready.put(ctx)
        ready.put(_END)

    Thread(target=work, daemon=True).start()
    while (ctx := ready.get()) is not _END:
        yield ctx


def nothing(ctx: Any) -> None:
    """Neither prepares nor trains."""


def us_by_hand() -> float:
    """Microseconds of an iteration that does nothing."""
    begin = time.perf_counter()
    for ctx in by_hand(iter(range(ITERATIONS)), nothing):
        nothing(ctx)
    return (time.perf_counter() - begin) / ITERATIONS * 1e6


def us_overlapped(loader: Callable[[], Any]) -> float:
    """The same under ``overlap``."""
    tasks = [PipelineTask("prepare", nothing, pure=True), PipelineTask("train", nothing)]
    with swpipe.overlap(loader(), tasks, pull_ahead=True, device="cpu") as loop:
        begin = time.perf_counter()
        for _ in loop:
            pass
        return (time.perf_counter() - begin) / ITERATIONS * 1e6


def busy_by_hand(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """Reading, inflating and features on one core, training on the other."""
    for ctx in by_hand(paths, lambda ctx: setattr(ctx, "x", loop.feed(ctx.batch).x)):
        loop.train(ctx)
        yield ctx


def busy_overlapped(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """The same tasks, those that prepare declared pure."""
    pure = [PipelineTask(t.name, t.fn, pure=True) for t in loop.tasks if t.name not in TRAIN]
    tasks = [*pure, *(task for task in loop.tasks if task.name in TRAIN)]
    with swpipe.overlap(paths, tasks, pull_ahead=True, device="cpu") as overlapped:
        yield from overlapped


def first_batch(overlapped: bool) -> tuple[float, float]:
    """Seconds until the first batch of a loop over a large table, and the process's peak in MiB."""
    command = [sys.executable, "-m", "tests.bench.overlap", "overlap" if overlapped else "plain"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, mib = map(float, printed.split())
    return seconds, mib


def rows(rounds: int = 7, batches: int = 60) -> list[Row]:
    """Costs of an iteration, throughput on two busy cores, and the beginning over a table."""
    loaders = {"list": lambda: list(range(ITERATIONS)), "iterator": lambda: iter(range(ITERATIONS))}
    hand, *ours = interleaved(
        rounds, us_by_hand, *(lambda make=make: us_overlapped(make) for make in loaders.values())
    )
    found = []
    for name, times in zip(loaders, ours, strict=True):
        found.append(compared(f"empty iteration over a {name}", times, hand, "us", "by hand"))
        more = sorted(a - b for a, b in zip(times, hand, strict=True))[rounds // 2]
        found.append(tolerated(f"more than by hand, {name}", more, MOST_US, "us", 1))
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        overlapped, hand = interleaved(
            rounds,
            lambda: ms_per_batch(busy_overlapped, paths, batches),
            lambda: ms_per_batch(busy_by_hand, paths, batches),
        )
    found.append(compared("two busy cores", overlapped, hand, "ms", "by hand", 1 / 0.97))
    pairs = [(first_batch(True), first_batch(False)) for _ in range(3)]
    later = sorted(1e3 * (ours[0] - plain[0]) for ours, plain in pairs)[1]
    more = sorted(ours[1] - plain[1] for ours, plain in pairs)[1]
    found.append(tolerated("first batch over a table of 0.9 GiB, later", later, MOST_MS, "ms"))
    found.append(tolerated("peak memory of that loop, more", more, MOST_MIB, "MiB"))
    return found


def over_a_table(overlapped: bool) -> None:
    """Train a table for some iterations; print seconds to the first batch, and the peak in MiB."""
    table = nn.Embedding(TABLE_ROWS, 64, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    loader = [torch.arange(i, i + 256) for i in range(8)]

    def decode(ctx: Any) -> None:
        ctx.ids = ctx.batch * 3

    def train(ctx: Any) -> None:
        optimizer.zero_grad()
        table(ctx.ids).square().sum().backward()
        optimizer.step()

    begin, seconds = time.perf_counter(), 0.0
    if overlapped:
        tasks = [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]
        contexts: Iterable[Any] = swpipe.overlap(loader, tasks, device="cpu")
    else:
        contexts = map(_run(decode, train), loader)
    for _ in contexts:
        seconds = seconds or time.perf_counter() - begin
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _run(*functions: Callable[[Any], None]) -> Callable[[Any], IterContext]:
    def run(batch: Any) -> IterContext:
        ctx = IterContext(batch, 0)
        for function in functions:
            function(ctx)
        return ctx

    return run


if __name__ == "__main__":
    over_a_table(sys.argv[1] == "overlap")
