"""What an empty task costs, beside an engine that hands over each task and one that does per group.

The second is the fastest that threads can do: it hands a batch on once per thread group and period.
A plan of empty tasks shows the engine's cost and nothing else.
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
    """An empty task."""


def plan(groups: Sequence[str], depth: int, tasks: int = TASKS) -> PipelinePlan:
    """A chain of tasks in three stages; ``groups`` names the thread group of each equal part."""
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
    """swpipe beside a stand-in under one plan."""
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
    """Beside the queue per task, which has bars, then beside the queue per group."""
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
