"""One data-bound loop under swpipe, torchdata.nodes and spdl, and as a plain loop.

Reading, inflating and making features of a batch takes about as long as training on it. Each way to
run the loop prepares batches on one thread of its own, up to two ahead, except the plain loop.
torchdata and spdl are optional: ``make bench`` installs them.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure import Row, compared, interleaved
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.plans import prefetch_plan

AHEAD = 2
WARM_UP = 25  # the first 16 iterations of a plan that is not proved are watched
FEED, TRAIN = ("read", "inflate", "features"), ("forward", "backward", "step")
PLAN = prefetch_plan(FEED, TRAIN, carried=[("forward", "step")], depth=AHEAD + 1, pull_group=None)


def files(folder: Path, count: int = 4, rows: int = 4096) -> list[Path]:
    """Compressed batches on disk."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.z" for number in range(count)]
    for path in paths:
        path.write_bytes(zlib.compress(rng.integers(0, 9, (rows, 64), dtype=np.int32).tobytes()))
    return paths


def loop_tasks() -> list[PipelineTask]:
    """Read, inflate, make features; then train a small network."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def read(ctx: IterContext) -> None:
        ctx.packed = ctx.batch.read_bytes()

    def inflate(ctx: IterContext) -> None:
        ctx.raw = zlib.decompress(ctx.packed)

    def features(ctx: IterContext) -> None:
        counts = np.frombuffer(ctx.raw, np.int32).reshape(-1, 64)
        logs = np.log1p(counts.astype(np.float32))
        ctx.x = torch.from_numpy(logs - logs.mean(0))

    def forward(ctx: IterContext) -> None:
        ctx.loss = model(ctx.x).square().mean()

    def backward(ctx: IterContext) -> None:
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx: IterContext) -> None:
        optimizer.step()

    named = (read, inflate, features, forward, backward, step)
    return [PipelineTask(fn.__name__, fn) for fn in named]


class Loop(NamedTuple):
    """The loop, cut in two.

    Attributes:
        tasks: All of it, for swpipe.
        feed: Prepares a batch, from its path.
        train: Trains on a batch.
    """

    tasks: list[PipelineTask]
    feed: Callable[[Path], IterContext]
    train: Callable[[IterContext], None]


def loop() -> Loop:
    """The loop with a new model; always the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tasks = loop_tasks()
    first, last = ([task.fn for task in tasks if task.name in half] for half in (FEED, TRAIN))

    def feed(path: Path) -> IterContext:
        ctx = IterContext(path, 0)
        for fn in first:
            fn(ctx)
        return ctx

    def train(ctx: IterContext) -> None:
        for fn in last:
            fn(ctx)

    return Loop(tasks, feed, train)


def run_plain(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """No overlap."""
    for path in paths:
        ctx = loop.feed(path)
        loop.train(ctx)
        yield ctx


def run_swpipe(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """``prefetch_plan``: one feeding thread, a depth of three."""
    with SWPipeline(PLAN, loop.tasks, device="cpu") as pipe:
        yield from pipe.iterate(paths)


def run_torchdata(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """A Mapper behind a Prefetcher, which runs it on its thread."""
    from torchdata.nodes import IterableWrapper, Loader, Mapper, Prefetcher

    source: Any = Mapper(IterableWrapper(paths), loop.feed)
    for ctx in Loader(Prefetcher(source, prefetch_factor=AHEAD)):
        loop.train(ctx)
        yield ctx


def run_spdl(loop: Loop, paths: Iterable[Path]) -> Iterator[IterContext]:
    """One stage on one thread, and a sink with room for two."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(paths).pipe(loop.feed).add_sink(AHEAD)
    pipeline = builder.build(num_threads=1, use_thread_output_queue=True)
    with pipeline.auto_stop():
        for ctx in pipeline:
            loop.train(ctx)
            yield ctx


Runner = Callable[[Loop, Iterable[Path]], Iterator[IterContext]]

OTHERS: dict[str, Runner] = {
    "plain loop": run_plain,
    "torchdata.nodes": run_torchdata,
    "spdl": run_spdl,
}


def absent(name: str) -> bool:
    """Whether this way of running a loop needs a package that is not installed."""
    ours = name in ("plain loop", "thread and queue")
    return not ours and find_spec(name.partition(".")[0]) is None


def ms_per_batch(runner: Runner, paths: Sequence[Path], batches: int) -> float:
    """Time per batch of the steady state, in ms."""
    many = [paths[i % len(paths)] for i in range(WARM_UP + batches)]
    with closing(runner(loop(), many)) as contexts:
        for _ in islice(contexts, WARM_UP):
            pass
        begin = time.perf_counter()
        for _ in islice(contexts, batches - AHEAD):
            pass
        seconds = time.perf_counter() - begin
    return seconds / (batches - AHEAD) * 1e3


def rows(rounds: int = 7, batches: int = 60) -> list[Row]:
    """A row per other way, all from the same rounds; an absent package says so."""
    there = {name: runner for name, runner in OTHERS.items() if not absent(name)}
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        ours, *others = interleaved(
            rounds,
            *(
                lambda runner=runner: ms_per_batch(runner, paths, batches)
                for runner in (run_swpipe, *there.values())
            ),
        )
    found = [
        compared(f"data-bound loop, beside {name}", ours, times, "ms", name)
        for name, times in zip(there, others, strict=True)
    ]
    return found + [
        Row(f"data-bound loop, beside {name}", "skipped: not installed (make bench installs it)")
        for name in OTHERS
        if name not in there
    ]
