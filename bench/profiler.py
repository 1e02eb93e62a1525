"""The profiler's estimate of how long tasks need the interpreter lock.

Python code needs it all the time, a kernel only part of the time; the measurement takes an idle
core (``swpipe.profiler.thread_costs``). ``bench.exposed`` covers exposed times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.measure import Row, Spread, off_by
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.profiler import measure_costs

PYTHON_MS = 4.0
PYTHON_BAR = 1.25
"""The bar for the ratio of its CPU time to the measured need for the lock, greater over smaller."""

KERNEL_BAR = 0.7
"""The bar for the ratio of a kernel's measured need for the lock to its host time."""

LEAST = 1e-3
"""The least time for a ratio, in ms; a busy machine can measure 0."""


def python(ctx: IterContext) -> None:
    """Run Python code that releases the lock only when another thread asks for it."""
    end_s = time.thread_time() + PYTHON_MS * 1e-3
    while time.thread_time() < end_s:
        pass


def lock_ms(name: str, fn: Callable[[IterContext], object]) -> tuple[float, float]:
    """Return the time in which the task needs the lock, and its host time, in ms."""
    tasks = [PipelineTask(name, fn)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        cost = measure_costs(pipe, [None], num_warmup=1, num_measure=5).tasks[name]
    return max(LEAST, cost.gil_us / 1e3), cost.host_us / 1e3


def python_row(rounds: int) -> Row:
    """Measure a loop in Python, which needs the lock all the time."""
    needs = [lock_ms("python", python)[0] for _ in range(rounds)]
    return Row(
        what="needs the interpreter lock, Python",
        ours=f"{Spread.of(needs).text()} ms",
        beside=f"true {PYTHON_MS:.2f} ms",
        ratio=off_by(needs, [PYTHON_MS] * rounds),
        bar=PYTHON_BAR,
    )


def kernel_row(rounds: int) -> Row:
    """Measure a matrix product of several ms."""
    square = torch.randn(700, 700)
    found = [lock_ms("product", lambda ctx: torch.mm(square, square)) for _ in range(rounds)]
    return Row(
        what="needs the interpreter lock, a kernel",
        ours=f"{Spread.of(gil for gil, _ in found).text()} ms",
        beside=f"of {Spread.of(host for _, host in found).text()} ms",
        ratio=Spread.of(gil / host for gil, host in found),
        bar=KERNEL_BAR,
    )


def rows(rounds: int = 5) -> list[Row]:
    """Return the rows of the Python loop and of the kernel."""
    return [python_row(rounds), kernel_row(rounds)]
