"""The interval over the busiest stream's time, on a device made of threads.

A batch takes 1 ms to pull and each launch 0.3 ms of host time; the streams' work hides both.
``bench.gpu`` measures the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.interval import block, ms_per_period
from bench.measure import Row, Spread, interleaved
from bench.timed_device import TimedDevice
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

STREAM_MS = {"copy": 7.0, "compute": 10.0, "offload": 6.0}
PULL_S = 1e-3
LAUNCH_S = 0.3e-3
DEPTH = 4


def plan(group: str) -> PipelinePlan:
    """Three streams; ``group`` is the thread group that launches the copy."""
    return PipelinePlan(
        {
            "copy": TaskSchedule(0, "memcpy", group),
            "compute": TaskSchedule(1),
            "offload": TaskSchedule(2, "offload"),
        },
        deps=[("compute", "copy"), ("offload", "compute")],
        pipeline_depth=DEPTH,
    )


def tasks(device: TimedDevice) -> list[PipelineTask]:
    """Each task blocks the host for a moment and its stream for its time."""

    def task(name: str, ms: float) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            block(LAUNCH_S)
            device.launch(lambda: block(ms * 1e-3))

        return PipelineTask(name, fn)

    return [task(name, ms) for name, ms in STREAM_MS.items()]


def pulled(count: int) -> Iterator[int]:
    """Batches, each after a short wait."""
    for i in range(count):
        block(PULL_S)
        yield i


def row(what: str, group: str, rounds: int, periods: int) -> Row:
    """One way to launch the copy; without a bar."""
    bound_ms = max(STREAM_MS.values())
    with TimedDevice() as device, SWPipeline(plan(group), tasks(device), device=device) as pipe:
        (measured,) = interleaved(rounds, lambda: ms_per_period(pipe, periods, pulled))
    return Row(
        what=f"interval, 3 streams, {what}",
        ours=f"{Spread.of(measured).text()} ms",
        beside=f"bound {bound_ms:.2f} ms",
        ratio=Spread.of(ms / bound_ms for ms in measured),
    )


def rows(rounds: int = 5, periods: int = 30) -> list[Row]:
    """Launch the copy from the caller's thread, then from one of its own."""
    return [
        row("one thread", "default", rounds, periods),
        row("copy thread", "io", rounds, periods),
    ]
