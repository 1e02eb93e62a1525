"""Whether memory stays flat over 10,000 iterations, whose contexts hold 64 KiB each."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.bench.measure import Row, Spread

PAYLOAD = 64 * 1024
WARM_UP = 1000
PYTHON_KIB = 64
"""What Python objects may grow by: one context too many that stays alive would pass it."""

RESIDENT_MIB = 8
"""What the process may grow by: 10,000 lost payloads are 640."""


class Growth(NamedTuple):
    python_kib: float
    resident_mib: float


def plan() -> PipelinePlan:
    """Four tasks on three thread groups; attributes are made, overwritten and deleted."""

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
    """What ``iterations`` more leave behind, with the pipeline full before and after."""
    with SWPipeline(plan(), device="cpu") as pipe:
        data = iter(range(WARM_UP + iterations))
        _run(pipe, data, WARM_UP // 2)
        tracemalloc.start()
        _run(pipe, data, WARM_UP // 2)
        python, resident = _held()
        _run(pipe, data, iterations - pipe.plan.depth)
        grown = Growth(
            *(after - before for after, before in zip(_held(), (python, resident), strict=True))
        )
        tracemalloc.stop()
    return grown


def _run(pipe: SWPipeline, data: Iterator[int], iterations: int) -> None:
    for _ in range(iterations):
        pipe.progress(data)


def _held() -> Growth:
    """KiB of Python objects, and MiB of the process, at this moment."""
    gc.collect()
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Growth(tracemalloc.get_traced_memory()[0] / 2**10, resident)


def rows(iterations: int = 10_000) -> list[Row]:
    """Growth over what is tolerated, of Python's objects and of the process."""
    grown = growth(iterations)
    return [
        Row(
            what=f"Python objects after {iterations:,} iterations",
            ours=f"{grown.python_kib:+.0f} KiB",
            beside=f"tolerated {PYTHON_KIB} KiB",
            ratio=Spread.of([grown.python_kib / PYTHON_KIB]),
            bar=1.0,
        ),
        Row(
            what=f"resident memory after {iterations:,} iterations",
            ours=f"{grown.resident_mib:+.1f} MiB",
            beside=f"tolerated {RESIDENT_MIB} MiB",
            ratio=Spread.of([grown.resident_mib / RESIDENT_MIB]),
            bar=1.0,
        ),
    ]
