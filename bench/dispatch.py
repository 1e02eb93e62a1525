"""The cost of an empty task, compared with an engine of one hand-over per task, and one per group.

An engine that hands over once per thread group and period is the fastest that threads allow. Under
a plan of empty tasks only the engine's cost is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from bench.measure import Row, compared, interleaved
from bench.standin import GroupQueues, TaskQueues
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

TASKS = 12
WARM_UP = 50


class Engine(Protocol):
    def progress(self, iterator: Iterator[Any]) -> IterContext: ...


def nothing(ctx: IterContext) -> None:
    """Do nothing."""


def plan(groups: Sequence[str], depth: int, tasks: int = TASKS) -> PipelinePlan:
    """Return a chain of tasks in three stages; the thread groups get equal parts of it."""
    names = [f"t{i:04}" for i in range(tasks)]
    return PipelinePlan(
        schedule={
            PipelineTask(name, nothing): TaskSchedule(
                i * 3 // tasks, thread_group=groups[i * len(groups) // tasks]
            )
            for i, name in enumerate(names)
        },
        deps=list(zip(names[1:], names, strict=False)),
        pipeline_depth=depth,
    )


def us_per_task(engine: Engine, iterations: int, tasks: int = TASKS) -> float:
    """Return the time per task in us while the pipeline is full."""
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
    return seconds / iterations / tasks * 1e6


StandIn = Callable[[PipelinePlan, Sequence[PipelineTask]], AbstractContextManager[Engine]]


def row(
    what: str,
    plan: PipelinePlan,
    stand_in: StandIn,
    bar: float | None,
    rounds: int,
    iterations: int,
) -> Row:
    """Compare swpipe with a stand-in under one plan."""
    tasks = len(plan.tasks)
    with SWPipeline(plan, device="cpu") as ours, stand_in(plan, plan.tasks) as theirs:
        a, b = interleaved(
            rounds,
            lambda: us_per_task(ours, iterations, tasks),
            lambda: us_per_task(theirs, iterations, tasks),
        )
    per = "task" if stand_in is TaskQueues else "group"
    label = f"a queue item per {per}"
    return compared(f"{tasks} empty tasks, {what}, over {label}", a, b, "us/task", "", bar)


THREE = ("read", "copy", "default")


def rows(rounds: int = 15, iterations: int = 1000) -> list[Row]:
    """Compare with the queue per task, which has bars, and with the queue per group."""
    inline = plan(["default"], depth=3)
    threads = plan(THREE, depth=5)
    # Eight hand-overs between threads in every period: the threads' own cost, whatever the engine.
    mixed = plan(THREE * 4, depth=5)
    return [
        row("all in group default", inline, TaskQueues, 0.2, rounds, iterations),
        row("3 thread groups", threads, TaskQueues, 0.5, rounds, iterations),
        row("next one in another group", mixed, TaskQueues, None, rounds, iterations // 3),
        *(
            row("3 thread groups", plan(THREE, 5, tasks), GroupQueues, None, rounds, iterations)
            for tasks in (3, 6, 9, 12)
        ),
    ]
