"""The growth of memory over 10,000 iterations with 64 KiB each, and 2,000 of TorchRec's step."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

from bench.measure import Row, resident_mib, tolerated
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

PAYLOAD = 64 * 1024
WARM_UP = 1000
PYTHON_KIB = 64
"""The limit for Python objects: one leaked context is more."""

RESIDENT_MIB = 8
"""The limit for the process: 10,000 leaked payloads are 640 MiB."""


OBJECTS = 1000
"""The limit for Python objects of TorchRec's step: one leaked in each iteration would be 2,000."""


class Growth(NamedTuple):
    python_kib: float
    resident_mib: float


def plan() -> PipelinePlan:
    """Return a plan of four tasks on three groups that set, replace and delete attributes."""

    def read(ctx: IterContext) -> None:
        ctx.raw = bytearray(PAYLOAD)

    def decode(ctx: IterContext) -> None:
        ctx.decoded = bytes(ctx.raw)
        del ctx.raw

    def forward(ctx: IterContext) -> None:
        ctx.loss = float(len(ctx.decoded))

    def step(ctx: IterContext) -> None:
        ctx.loss = ctx.loss + 1.0

    return PipelinePlan(
        schedule={
            PipelineTask("read", read): TaskSchedule(0, thread_group="read"),
            PipelineTask("decode", decode): TaskSchedule(1, thread_group="decode"),
            PipelineTask("forward", forward): TaskSchedule(2),
            PipelineTask("step", step): TaskSchedule(2),
        },
        deps=[("decode", "read"), ("forward", "decode"), ("step", "forward")],
        cross_iter_deps=[("forward", "step")],
        pipeline_depth=5,
    )


def growth(iterations: int) -> Growth:
    """Return the growth over ``iterations``, measured while nothing is in flight."""
    with SWPipeline(plan(), device="cpu") as pipe:
        data = itertools.count()
        _run(pipe, data, WARM_UP // 2)
        tracemalloc.start()
        _run(pipe, data, WARM_UP // 2)
        before = _held()
        _run(pipe, data, iterations)
        after = _held()
        tracemalloc.stop()
    return Growth(*(b - a for a, b in zip(before, after, strict=True)))


def _run(pipe: SWPipeline, data: Iterator[int], iterations: int) -> None:
    for _ in range(iterations):
        pipe.progress(data)
    pipe.drain()


def _held() -> Growth:
    """Return the KiB of Python objects and the MiB of the process."""
    gc.collect()
    return Growth(tracemalloc.get_traced_memory()[0] / 2**10, resident_mib())


def on_rank(passes: int) -> tuple[int, float]:
    """Return the objects and MiB that ``passes`` of a pipeline over ten batches leave behind."""
    from bench.dlrm import CPU, TINY, batches, dense_optimizer, sharded_dlrm
    from swpipe.tasks.torchrec import PipelineFactory

    model = sharded_dlrm(TINY)
    data = batches(TINY, 10)
    name = "jagged_split_sparse_dist"
    optimizer = dense_optimizer(model)
    with PipelineFactory.create(name, model=model, optimizer=optimizer, device=CPU) as pipeline:

        def held_after(passes: int) -> tuple[int, float]:
            for _ in range(passes):
                source = iter(data)
                with suppress(StopIteration):
                    while True:
                        pipeline.progress(source)
            gc.collect()
            return len(gc.get_objects()), resident_mib()

        before = held_after(1 + passes // 4)
        after = held_after(passes)
    return after[0] - before[0], after[1] - before[1]


def rows(iterations: int = 10_000, passes: int = 200) -> list[Row]:
    """Return the growth of Python objects and of the process, over their limits."""
    grown = growth(iterations)
    after = f"after {iterations:,} iterations"
    found = [
        tolerated(f"Python objects {after}", grown.python_kib, PYTHON_KIB, "KiB"),
        tolerated(f"resident memory {after}", grown.resident_mib, RESIDENT_MIB, "MiB", digits=1),
    ]
    if find_spec("torchrec") is None:
        return [*found, Row("memory of TorchRec's step", "skipped: there is no torchrec")]
    from bench.contest import on_ranks

    objects, mib = (max(each) for each in zip(*on_ranks(on_rank, passes), strict=True))
    after = f"after {10 * passes:,} of TorchRec's steps on two ranks"
    return [
        *found,
        tolerated(f"Python objects {after}", objects, OBJECTS, ""),
        tolerated(f"resident memory {after}", mib, RESIDENT_MIB, "MiB", digits=1),
    ]
