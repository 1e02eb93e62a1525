"""What a task costs that does nothing: 12 tasks in 3 stages, in one thread group and in three."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.bench.measure import Row, Spread, interleaved, ratios
from tests.bench.standin import StandIn

TASKS = 12
WARM_UP = 50


class Engine(Protocol):
    def progress(self, iterator: Iterator[Any]) -> IterContext: ...


def nothing(ctx: IterContext) -> None:
    """An empty task."""


def plan(groups: Sequence[str], depth: int) -> PipelinePlan:
    """A chain of 12 tasks, four per stage; ``groups`` names each task's, or each stage's."""
    names = [f"t{i:02}" for i in range(TASKS)]
    each = TASKS // len(groups)
    return PipelinePlan(
        schedule={
            PipelineTask(name, nothing): TaskSchedule(i // 4, thread_group=groups[i // each])
            for i, name in enumerate(names)
        },
        deps=list(zip(names[1:], names, strict=False)),
        pipeline_depth=depth,
    )


def us_per_task(engine: Engine, iterations: int) -> float:
    """Time per task with the pipeline full, in us."""
    data = iter(range(iterations + 2 * WARM_UP))
    for _ in range(WARM_UP):
        engine.progress(data)
    begin = time.perf_counter()
    for _ in range(iterations):
        engine.progress(data)
    seconds = time.perf_counter() - begin
    with contextlib.suppress(StopIteration):
        while True:
            engine.progress(data)
    return seconds / iterations / TASKS * 1e6


def row(what: str, plan: PipelinePlan, bar: float | None, rounds: int, iterations: int) -> Row:
    """swpipe beside the stand-in under one plan."""
    with SWPipeline(plan, device="cpu") as ours, StandIn(plan, plan.tasks) as theirs:
        a, b = interleaved(
            rounds, lambda: us_per_task(ours, iterations), lambda: us_per_task(theirs, iterations)
        )
    return Row(
        what=what,
        ours=f"{Spread.of(a).text()} us/task",
        beside=f"stand-in {Spread.of(b).text()} us/task",
        ratio=ratios(a, b),
        bar=bar,
    )


def rows(rounds: int = 15, iterations: int = 1000) -> list[Row]:
    """The two rows of dispatch, and one for the worst that a plan can ask for."""
    inline = plan(["default"], depth=3)
    threads = plan(["read", "copy", "default"], depth=5)
    # Eight hand-overs between threads in every period: the threads' own cost, whatever the engine.
    mixed = plan(["read", "copy", "default"] * 4, depth=5)
    return [
        row("empty tasks, all in group default", inline, 0.2, rounds, iterations),
        row("empty tasks, 3 thread groups, depth 5", threads, 0.5, rounds, iterations),
        row("empty tasks, next one in another group", mixed, None, rounds, iterations // 3),
    ]
