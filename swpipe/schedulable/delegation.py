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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask, TaskFn
from swpipe.errors import Problem
from swpipe.pipeline import SWPipeline
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.executors import Executor, order_streams
from swpipe.schedulable.schedule import Schedule, Stage
from swpipe.schedulable.schedule_edges import period_order
from swpipe.schedulable.slot_context import PeriodContext, TaskContext, TaskPlace
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool
from swpipe.schedulable.translation import stream_waits


class DelegatedPipeline(SWPipeline[IterContext]):
    """A pipeline whose tasks run somewhere else: none can be replayed."""

    def enable_shortcut(self, *tasks: Any) -> None:
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
    tasks: list[tuple[int, PipelineTask]] = []
    for number, stage in enumerate(schedule.stages, start=1):
        members = [task for task in order if task in stage.tasks]
        noted: dict[str, TaskContext] = {}
        for task in members:
            entries[task.name] = replace(plan.schedule[task.name], globally_ordered=False)
            place = TaskPlace(pool, first, most - task.lookahead)
            states = _states(io[task.name])
            tasks.append((place.stage, PipelineTask(task.name, _note(task, place, noted), states)))
        call = _Call(executor, Stage(tuple(members)), noted, waits, pool, first)
        for lookahead in sorted({task.lookahead for task in members}, reverse=True):
            name = _free(f"call of Stage {number} at lookahead {lookahead}", plan)
            entries[name] = TaskSchedule(most - lookahead)
            forget = DeclaredIO(reset=noted.clear)
            at = most - lookahead
            tasks.append((at, PipelineTask(name, call.at(at), [forget])))
    return replace(
        plan,
        schedule=entries,
        order=list(entries),
        tasks=tuple(task for _, task in sorted(tasks, key=lambda one: one[0])),
    )


def _states(io: Iterable[DeclaredIO]) -> list[DeclaredIO]:
    """What stays of a task's io: there is no replay that captures."""
    kept = [one for one in io if one.state is not None or one.reset is not None]
    return [replace(one, capture=None, restore=None) for one in kept]


def _note(task: Task, place: TaskPlace, noted: dict[str, TaskContext]) -> TaskFn:
    def note(ctx: IterContext) -> None:
        noted[task.name] = TaskContext(ctx, place)

    return note


def _free(name: str, plan: PipelinePlan) -> str:
    while name in plan.schedule:
        name += "'"
    return name


class _Call:
    """Calls the executor for the tasks of a stage that have been noted."""

    def __init__(
        self,
        executor: Executor,
        stage: Stage,
        noted: dict[str, TaskContext],
        waits: Any,
        pool: StreamPool,
        first: Callable[[], int],
    ) -> None:
        self._executor, self._stage, self._noted = executor, stage, noted
        self._waits, self._pool, self._first = waits, pool, first

    def at(self, stage: int) -> TaskFn:
        """The function of the call that is at this stage of the plan."""

        def call(ctx: IterContext) -> None:
            if not self._noted:
                return
            noted = dict(self._noted)
            self._noted.clear()
            self._executor.execute_stage(
                self._stage,
                PeriodContext(noted),
                ctx.iter_idx - self._first() + stage,
                lambda task: task.name in noted,
                self._waits,
                self._pool,
            )
            for name in self._pool.names:  # the engine takes the work to be on this stream
                order_streams(self._pool, DEFAULT, name)

        return call
