"""Tasks that record their runs, and schedules of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from swpipe.schedulable import SchedulablePipeline, Schedule, Stage, StreamPool, Task, TaskContext


class Ran(NamedTuple):
    """A run of a task."""

    period: int
    task: str
    batch: Any
    thread: str


class Log:
    """A log of the runs of tasks that it makes."""

    def __init__(self) -> None:
        self.runs: list[Ran] = []

    def task(
        self, name: str, fn: Callable[[TaskContext], Any] | None = None, **fields: Any
    ) -> Task:
        """Return a task that calls ``fn``, and then sets each slot it writes to the batch."""

        def run(ctx: TaskContext) -> None:
            batch = ctx.slots["batch_cpu"]
            self.runs.append(Ran(ctx.iter_count, name, batch, threading.current_thread().name))
            if fn is not None:
                fn(ctx)
            for slot in task.writes:
                if slot.name not in ctx.slots:
                    ctx.slots.set(slot.name, batch)

        task = Task.from_fn(name, run, **fields)
        return task

    def periods(self, task: str) -> list[tuple[int, Any]]:
        """Return (period, batch) of each run of a task."""
        return [(run.period, run.batch) for run in self.runs if run.task == task]

    def order(self, period: int) -> list[str]:
        """Return the tasks of a period, in the order in which they began."""
        return [run.task for run in self.runs if run.period == period]


def one_stage(*tasks: Task, streams: Iterable[str] = ("default",)) -> Schedule:
    """Return a schedule of one stage."""
    return Schedule((Stage(tasks),), tuple(streams))


def pool(*names: str) -> StreamPool:
    """Return a pool without streams of its own."""
    return StreamPool(dict.fromkeys(("default", *names)))


def results(pipe: SchedulablePipeline, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield everything that ``progress`` returns until the iterator ends."""
    iterator = iter(batches)
    while True:
        try:
            yield pipe.progress(iterator)
        except StopIteration:
            return
