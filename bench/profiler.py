"""The profiler's accuracy: exposed times of tasks that block, and needs for the interpreter lock.

Exposed times must be within 5% of the times in a bare loop in the same round. The ratio is the
greater over the smaller of the two. The profiler must find that Python code needs the interpreter
lock all the time and a kernel only part of it; this takes an idle core
(``swpipe.profiler.thread_costs``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.interval import alone_ms, block
from bench.measure import Row, Spread, interleaved, off_by
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe.profiler import measure_costs

EXPOSED_BAR = 1.05
PYTHON_MS = 4.0
PYTHON_BAR = 1.25
"""Its CPU time and the measured need for the lock, the greater over the smaller."""

KERNEL_BAR = 0.7
"""A kernel's measured need for the lock, over its host time."""

LEAST = 1e-3
"""The least time for a ratio, in ms; a busy machine can measure 0."""

SERIAL = PipelinePlan({"read": TaskSchedule(), "train": TaskSchedule()}, deps=[("train", "read")])
BESIDE = PipelinePlan(
    {"read": TaskSchedule(thread_group="io"), "train": TaskSchedule(stage=1)},
    deps=[("train", "read")],
)


def blocking(milliseconds: float) -> Callable[[IterContext], None]:
    """A task's function that blocks."""
    return lambda ctx: block(milliseconds * 1e-3)


def exposed_row(pipelined: bool, rounds: int, measure: int) -> Row:
    """Reading for 8 ms, and training for 4; under the plan half of the reading is hidden."""
    read, train = blocking(8), blocking(4)
    tasks = [PipelineTask("read", read), PipelineTask("train", train)]
    with SWPipeline(BESIDE if pipelined else SERIAL, tasks, device="cpu") as pipe:

        def exposed_ms() -> float:
            result = TaskProfiler(pipe).profile(
                None, num_warmup=1, num_measure=measure, num_rounds=3, pipelined=pipelined
            )
            return max(LEAST, result.exposed_s["read"] * 1e3)

        def true_ms() -> float:
            hidden_ms = alone_ms(train, measure) if pipelined else 0.0
            return max(LEAST, alone_ms(read, measure) - hidden_ms)

        measured, truth = interleaved(rounds, exposed_ms, true_ms)
    return Row(
        what=f"exposed time, {'half hidden' if pipelined else 'serially'}",
        ours=f"{Spread.of(measured).text()} ms",
        beside=f"true {Spread.of(truth).text()} ms",
        ratio=off_by(measured, truth),
        bar=EXPOSED_BAR,
    )


def python(ctx: IterContext) -> None:
    """Python code that releases the lock only when another thread asks for it."""
    end_s = time.thread_time() + PYTHON_MS * 1e-3
    while time.thread_time() < end_s:
        pass


def lock_ms(name: str, fn: Callable[[IterContext], object]) -> tuple[float, float]:
    """The time in which the task is found to need the lock, and its host time, in ms."""
    tasks = [PipelineTask(name, fn)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        cost = measure_costs(pipe, [None], num_warmup=1, num_measure=5).tasks[name]
    return max(LEAST, cost.gil_us / 1e3), cost.host_us / 1e3


def python_row(rounds: int) -> Row:
    """A loop in Python needs the lock all the time."""
    needs = [lock_ms("python", python)[0] for _ in range(rounds)]
    return Row(
        what="needs the interpreter lock, Python",
        ours=f"{Spread.of(needs).text()} ms",
        beside=f"true {PYTHON_MS:.2f} ms",
        ratio=off_by(needs, [PYTHON_MS] * rounds),
        bar=PYTHON_BAR,
    )


def kernel_row(rounds: int) -> Row:
    """One matrix product of several ms."""
    square = torch.randn(700, 700)
    found = [lock_ms("product", lambda ctx: torch.mm(square, square)) for _ in range(rounds)]
    return Row(
        what="needs the interpreter lock, a kernel",
        ours=f"{Spread.of(gil for gil, _ in found).text()} ms",
        beside=f"of {Spread.of(host for _, host in found).text()} ms",
        ratio=Spread.of(gil / host for gil, host in found),
        bar=KERNEL_BAR,
    )


def rows(rounds: int = 5, measure: int = 8) -> list[Row]:
    """Exposed serially and under the plan; the lock of Python and of a kernel."""
    return [
        exposed_row(pipelined=False, rounds=rounds, measure=measure),
        exposed_row(pipelined=True, rounds=rounds, measure=measure),
        python_row(rounds),
        kernel_row(rounds),
    ]
