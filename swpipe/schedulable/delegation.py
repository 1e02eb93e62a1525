"""An executor of the user's own runs the tasks of a period.

The plan is that of the schedule on the caller's thread, but for its functions: a task's own only
notes its context, and after all tasks of a stage another calls the executor, on the caller's
thread, with those noted.

    period   note h2d, note forward, ..., <call>, <call>    the first call in a period has the tasks

There is such a call for each lookahead, since an executor has to be called in periods in which only
some of them have a batch. Since the engine does not see the tasks themselves, they cannot be
replayed, timed or watched one by one, nor be seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from swpipe._values.walk import record_stream
from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.errors import Problem
from swpipe.pipeline import SWPipeline
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.executors import Executor, Waits, order_streams
from swpipe.schedulable.schedule import Schedule, Stage
from swpipe.schedulable.schedule_edges import period_order
from swpipe.schedulable.slot_context import PeriodContext, TaskContext, TaskPlace
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool
from swpipe.schedulable.translation import stream_waits


class DelegatedPipeline(SWPipeline[IterContext]):
    """A pipeline whose tasks run somewhere else: none can be replayed."""

    def enable_shortcut(self, *tasks: Any, with_: Any = None) -> None:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "an executor of your own runs the tasks, and they cannot be replayed one by one: use "
            "executor=None or 'threaded' for shortcuts and profiles"
        )


def delegation_problems(tasks: Iterable[Task]) -> Iterator[Problem]:
    """What an executor of the user's own cannot do."""
    for task in tasks:
        if task.random:
            yield Problem(
                f"task {task.name!r}: random is True, and an executor of your own runs it, which "
                "swpipe cannot seed: use executor=None or 'threaded', or leave random out",
                (task.name,),
            )


def delegated(
    plan: PipelinePlan,
    schedule: Schedule,
    pool: StreamPool,
    executor: Executor,
    first: Callable[[], int],
) -> PipelinePlan:
    """The plan in which the executor runs the tasks.

    Args:
        plan: Of the schedule, on the caller's thread.
        schedule: The schedule.
        pool: Its streams.
        executor: The user's.
        first: Returns the number of the first iteration of the run.
    """
    order = period_order(schedule)
    most, waits = schedule.max_lookahead, stream_waits(schedule)
    io = {task.name: task.io for task in plan.tasks}
    entries: dict[str, TaskSchedule] = {}
    tasks: list[PipelineTask] = []
    for number, stage in enumerate(schedule.stages, start=1):
        members = [task for task in order if task in stage.tasks]
        noted: dict[str, IterContext] = {}
        places = {task.name: TaskPlace(pool, first, most - task.lookahead) for task in members}
        for task in members:
            entries[task.name] = replace(plan.schedule[task.name], globally_ordered=False)
            states = _states(io[task.name])
            tasks.append(PipelineTask(task.name, partial(_note, noted, task.name), states))
        call = _Call(executor, Stage(tuple(members)), noted, places, waits, pool)
        for lookahead in sorted({task.lookahead for task in members}, reverse=True):
            name = _free(f"call of Stage {number} at lookahead {lookahead}", plan)
            entries[name] = TaskSchedule(most - lookahead)
            tasks.append(PipelineTask(name, call, [DeclaredIO(reset=noted.clear)]))
    return replace(
        plan,
        schedule=entries,
        order=list(entries),
        tasks=tuple(sorted(tasks, key=lambda task: entries[task.name].stage)),
    )


def _states(io: Iterable[DeclaredIO]) -> list[DeclaredIO]:
    """What stays of a task's io: there is no replay that captures."""
    kept = [one for one in io if one.state is not None or one.reset is not None]
    return [replace(one, capture=None, restore=None) for one in kept]


def _note(noted: dict[str, IterContext], name: str, ctx: IterContext) -> None:
    noted[name] = ctx


def _free(name: str, plan: PipelinePlan) -> str:
    while name in plan.schedule:
        name += "'"
    return name


class _Call:
    """Calls the executor for the tasks of a stage that have been noted, and are there to run."""

    def __init__(
        self,
        executor: Executor,
        stage: Stage,
        noted: dict[str, IterContext],
        places: Mapping[str, TaskPlace],
        waits: Waits,
        pool: StreamPool,
    ) -> None:
        self._executor, self._stage, self._noted = executor, stage, noted
        self._places, self._waits, self._pool = places, waits, pool

    def __call__(self, ctx: IterContext) -> None:
        if not self._noted:  # another call in this period had them
            return
        contexts = {name: TaskContext(of, self._places[name]) for name, of in self._noted.items()}
        before = [(of, vars(of).copy()) for of in self._noted.values()]
        self._noted.clear()
        (period, *_) = {context.iter_count for context in contexts.values()}
        self._executor.execute_stage(
            self._stage,
            PeriodContext(contexts),
            period,
            lambda task: task.name in contexts,
            self._waits,
            self._pool,
        )
        # To the engine all work is on this stream, and what contexts have no more it cannot see.
        for name in self._pool.names:
            order_streams(self._pool, DEFAULT, name)
        removed = [v for of, held in before for n, v in held.items() if vars(of).get(n) is not v]
        if any(map(self._pool.get, self._pool.names)):
            record_stream(removed, torch.accelerator.current_stream())
