"""The cost of making a pipeline, and what a trace, step times or a watched task add to a step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

import torch

from bench.dispatch import THREE, nothing, plan, us_per_task
from bench.measure import Row, compared, interleaved, timed_ms, tolerated
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.trace import StepTimes

MADE_MS = 50.0
"""The most time that making a pipeline of 1,000 tasks may take."""

TIMED_TASKS, TIMED_US = 10, 20
"""The number of tasks of a step, and the time that step times may add to it."""

STEP_US, OPERATORS, WARM_UP = 1000, 20, 50  # the first 16 iterations are all watched


def made_row(rounds: int, tasks: int = 1000) -> Row:
    """Time making and closing a pipeline of a chain of tasks in three thread groups."""
    chain = plan(THREE, depth=5, tasks=tasks)
    took = timed_ms(rounds, lambda: SWPipeline(chain, device="cpu").close())
    return tolerated(f"making a pipeline of {tasks:,} tasks", median(took), MADE_MS, "ms", 1)


def traced_row(rounds: int, iterations: int) -> Row:
    """Compare dispatch with and without a recorded trace."""
    with SWPipeline(plan(THREE, depth=5), device="cpu") as pipe:

        def traced() -> float:
            with pipe.trace():
                return us_per_task(pipe, iterations)

        on, off = interleaved(rounds, traced, lambda: us_per_task(pipe, iterations))
    return compared("recording a trace, 3 thread groups", on, off, "us/task", "off")


def timed_row(rounds: int, iterations: int) -> Row:
    """Measure what ``StepTimes`` adds to a step of empty tasks, at its default report interval."""
    tasks = [PipelineTask(f"t{i}", nothing) for i in range(TIMED_TASKS)]

    def us(observing: AbstractContextManager[None]) -> float:
        with observing:
            begin = time.perf_counter()
            for _ in pipe.iterate(range(iterations)):
                pass
            return (time.perf_counter() - begin) / iterations * 1e6

    with (
        tempfile.TemporaryDirectory() as folder,
        SWPipeline(PipelinePlan.serial(tasks), device="cpu", check_effects=False) as pipe,
    ):
        times = StepTimes(Path(folder) / "steps.jsonl")
        on, off = interleaved(rounds, lambda: us(pipe.observe(times)), lambda: us(nullcontext()))
    added = median(a - b for a, b in zip(on, off, strict=True))
    what = f"StepTimes adds to a step of {TIMED_TASKS} tasks"
    return tolerated(what, added, TIMED_US, "us", digits=1)


def watched_tasks() -> list[PipelineTask]:
    """Return a pure task of small operators, each seen when watched, and a task that computes."""
    matrix = torch.rand(96, 96)

    def decode(ctx: IterContext) -> None:
        ctx.x = ctx.batch
        for _ in range(OPERATORS):
            ctx.x = ctx.x * 1.5

    def train(ctx: IterContext) -> None:
        for _ in range(repeats):
            ctx.y = matrix @ matrix

    repeats = 1000
    begin = time.process_time()
    train(IterContext(None, 0))
    matmul_us = (time.process_time() - begin) * 1e6 / repeats
    repeats = max(1, round((STEP_US - 1.5 * OPERATORS) / matmul_us))
    return [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]


def watched_row(rounds: int, iterations: int) -> Row:
    """Compare a step that is watched by default, 2 iterations in 100, with one that is not.

    Process time is measured, so that other processes do not change the share of the check.
    """
    tasks = watched_tasks()

    def us_per_step(check: bool | None) -> Callable[[], float]:
        def measure() -> float:
            data = iter([torch.rand(64)] * (WARM_UP + iterations))
            plan = PipelinePlan.serial(tasks)
            with SWPipeline(plan, tasks, device="cpu", check_effects=check) as pipe:
                for _ in range(WARM_UP):
                    pipe.progress(data)
                begin = time.process_time()
                for _ in range(iterations):
                    pipe.progress(data)
                return (time.process_time() - begin) / iterations * 1e6

        return measure

    ours, theirs = interleaved(rounds, us_per_step(None), us_per_step(False))
    what = "a step of 1 ms with a pure task, watched by default"
    return compared(what, ours, theirs, "us", "unwatched", 1.02, digits=0)


def rows(rounds: int = 7, iterations: int = 500) -> list[Row]:
    """Return one row of each kind."""
    return [
        made_row(rounds),
        traced_row(rounds, iterations),
        timed_row(8 * rounds, iterations),
        watched_row(rounds, 2 * iterations),
    ]
