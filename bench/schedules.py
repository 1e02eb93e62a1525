"""The cost of a task of a schedule, compared with a task of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.dispatch import nothing, plan, us_per_task
from bench.measure import Row, Spread, compared, interleaved, tolerated
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.schedulable import SchedulablePipeline, Schedule, Stage, StreamPool, Task, TaskContext

TASKS = 12
MOST_MORE_US = 2.0
"""The most time that a task of a schedule may add."""


class ByContext:
    """A schedule with a pipeline's interface: it returns contexts."""

    def __init__(self, schedule: SchedulablePipeline) -> None:
        self._schedule = schedule

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        result: IterContext = self._schedule.progress(iterator)
        return result


def by_slots(ctx: TaskContext) -> None:
    """Read one slot and set another."""
    slots = ctx.slots
    slots.set("x", slots["batch_cpu"])


def by_attributes(ctx: IterContext) -> None:
    """Read one attribute of the context and set another."""
    ctx.x = ctx.batch


def schedule(fn: Callable[[Any], None]) -> Schedule:
    """Return the chain of ``bench.dispatch`` in three stages, as a schedule."""
    names = [f"t{i:04}" for i in range(TASKS)]
    tasks = [
        Task.from_fn(name, fn, lookahead=2 - i * 3 // TASKS, depends_on=names[max(0, i - 1) : i])
        for i, name in enumerate(names)
    ]
    return Schedule((Stage(tuple(tasks)),))


def task_rows(
    what: str,
    ours_fn: Callable[[Any], None],
    theirs_fn: Callable[[IterContext], None],
    rounds: int,
    iterations: int,
) -> list[Row]:
    """Return small tasks on the caller's thread."""
    by_hand = plan(["default"], depth=3)
    tasks = [PipelineTask(name, theirs_fn) for name in by_hand.schedule]
    with (
        SchedulablePipeline(schedule(ours_fn), StreamPool({"default": None}), device="cpu") as ours,
        SWPipeline(by_hand, tasks, device="cpu") as theirs,
    ):
        a, b = interleaved(
            rounds,
            lambda: us_per_task(ByContext(ours), iterations),
            lambda: us_per_task(theirs, iterations),
        )
    more = Spread.of(one - other for one, other in zip(a, b, strict=True)).median
    return [
        compared(f"{TASKS} {what} of a schedule", a, b, "us/task", "PipelineTasks"),
        tolerated(f"{what} of a schedule, more", more, MOST_MORE_US, "us/task", digits=2),
    ]


def rows(rounds: int = 15, iterations: int = 1000) -> list[Row]:
    """Return the rows of empty tasks and of tasks that use two slots."""
    return [
        *task_rows("empty tasks", nothing, nothing, rounds, iterations),
        *task_rows("tasks of two slots", by_slots, by_attributes, rounds, iterations),
    ]
