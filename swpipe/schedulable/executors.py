"""Executors: the assignment of tasks to threads, or a user-defined object that runs the tasks.

``SequentialExecutor`` and ``ThreadedExecutor`` only assign threads; swpipe's engine runs the tasks.
Their ``execute_stage`` is for executors that wrap them, and runs the tasks on the calling thread.

A user-defined executor runs the tasks of a period itself. The plan then contains the schedule's
tasks on the caller's thread, with other functions: each task records its context. After all tasks,
an additional task calls the executor for each stage, with the recorded contexts.

    period   record h2d, record forward, ..., <call>, <call>    the first call runs the tasks

There is one such task for each lookahead, because in the prologue and the epilogue only tasks of
some lookaheads have a batch. The engine does not see the tasks themselves, so it cannot replay,
time, check or seed a single task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from swpipe.core.context import IterContext
from swpipe.core.messages import listed, shown
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.task import LABEL_RULE, DeclaredIO, PipelineTask, is_label
from swpipe.errors import Problem
from swpipe.pipeline import SWPipeline
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import Schedule, Stage, Waits, period_order, stream_waits
from swpipe.schedulable.slot_context import Home, PeriodContext, TaskContext, TaskPlace
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool
from swpipe.values import record_stream

ThreadMap: TypeAlias = (
    Literal["by_stream", "per_task"] | Mapping[str, str] | Callable[[Task], str] | None
)


@runtime_checkable
class Executor(Protocol):
    """An object that runs the tasks of a period (seed section 9.3)."""

    def execute_stage(
        self,
        stage: Stage,
        ctx: PeriodContext,
        iter_count: int,
        should_run: Callable[[Task], bool],
        waits: Waits,
        pool: StreamPool,
    ) -> Any:
        """Run the tasks of ``stage`` that ``should_run`` selects, each with ``ctx.of(task)``."""

    def shutdown(self) -> None:
        """Release the executor's resources; called when the pipeline is shut down."""


class SequentialExecutor:
    """An executor that runs all tasks on the thread that calls ``progress``."""

    def execute_stage(
        self,
        stage: Stage,
        ctx: PeriodContext,
        iter_count: int,
        should_run: Callable[[Task], bool],
        waits: Waits,
        pool: StreamPool,
    ) -> None:
        """Run the tasks on the calling thread; streams wait for the streams listed in ``waits``."""
        for task in filter(should_run, stage.tasks):
            for name in waits.get(task.name, ()):
                pool.order(task.stream, name)
            with pool.use(task.stream):
                task.run(ctx.of(task))

    def shutdown(self) -> None:
        """Do nothing: the executor has no resources."""


class ThreadedExecutor(SequentialExecutor):
    """An executor that runs each task on the thread that ``thread_map`` names (seed section 4.1).

    Thread ``"default"`` is the caller's thread. Every other name is a thread of its own.

    Args:
        thread_map: None or ``"by_stream"`` for one thread per stream, with the stream's name.
            ``"per_task"`` for one thread per task. A dict of task name to thread name; tasks that
            are not in it run on ``"default"``. Or a function of the task that returns the thread's
            name.
        max_workers: The maximum number of threads besides the caller's thread; a schedule that
            needs more is refused. None for no limit.

    Raises:
        TypeError: ``thread_map`` or ``max_workers`` is of another kind.
        ValueError: ``thread_map`` is another string, or ``max_workers`` below 1.
    """

    def __init__(self, thread_map: ThreadMap = None, max_workers: int | None = None) -> None:
        # An unknown string is a wrong value; any other unknown object is a wrong type.
        is_known = thread_map is None or thread_map in ("by_stream", "per_task")
        if not (is_known or isinstance(thread_map, Mapping) or callable(thread_map)):
            kind = ValueError if isinstance(thread_map, str) else TypeError
            raise kind(
                f"thread_map is {shown(thread_map)}: give 'by_stream', 'per_task', a dict of task "
                "name to thread, or a function of the task"
            )
        if max_workers is not None and not (type(max_workers) is int and max_workers > 0):
            kind = ValueError if type(max_workers) is int else TypeError
            raise kind(f"max_workers is {shown(max_workers)}: give an integer from 1, or None")
        self.thread_map = thread_map
        self.max_workers = max_workers

    def thread_of(self, task: Task) -> str:
        """Return the name of the task's thread."""
        if self.thread_map in (None, "by_stream"):
            return task.stream
        if self.thread_map == "per_task":
            return task.name
        if isinstance(self.thread_map, Mapping):
            return self.thread_map.get(task.name, DEFAULT)
        return self.thread_map(task)  # type: ignore[operator]


def checked_executor(executor: Any) -> Executor:
    """Return the executor for the argument ``executor`` of a pipeline.

    Raises:
        TypeError: The argument lacks one of the two methods.
    """
    # None and the string are shorthands, as in the pipeline's signature.
    if executor is None:
        return SequentialExecutor()
    if executor == "threaded":
        return ThreadedExecutor()
    # A class has the two methods as well, but they need an instance.
    if isinstance(executor, type) or not isinstance(executor, Executor):
        raise TypeError(
            f"executor is {shown(executor)}: give None, 'threaded', an executor, or an object with "
            "the methods execute_stage and shutdown"
        )
    return executor


def is_ours(executor: Executor) -> bool:
    """Return whether the engine runs the tasks: ``execute_stage`` is not overridden."""
    # A subclass of the executors above that overrides the method wants to run the tasks itself.
    return getattr(type(executor), "execute_stage", None) is SequentialExecutor.execute_stage


def threads_of(executor: Executor, tasks: Sequence[Task]) -> tuple[dict[str, str], list[Problem]]:
    """Return the thread of each task, and the problems of the executor with these tasks."""
    # A user-defined executor is called on the caller's thread, whatever threads it uses itself.
    ours = is_ours(executor)
    if not (ours and isinstance(executor, ThreadedExecutor)):
        return dict.fromkeys((task.name for task in tasks), DEFAULT), [
            Problem(
                f"task {task.name!r}: random is True, and an executor of your own runs it, which "
                "swpipe cannot seed: use executor=None or 'threaded', or leave random out",
                (task.name,),
            )
            for task in tasks
            if task.random and not ours
        ]
    threads = {task.name: executor.thread_of(task) for task in tasks}
    problems = [*_map_problems(executor.thread_map, threads)]
    # Sorted by ``str``, because a wrong thread_map can return values that are not strings.
    workers = sorted({thread for thread in threads.values() if thread != DEFAULT}, key=str)
    most = executor.max_workers
    if not problems and most is not None and len(workers) > most:
        problems.append(
            Problem(
                f"max_workers is {most}, but thread_map names {len(workers)} threads besides the "
                f"caller's ({listed(workers)}): raise it, or name fewer"
            )
        )
    return threads, problems


def _map_problems(thread_map: ThreadMap, threads: Mapping[str, Any]) -> Iterator[Problem]:
    for name in thread_map if isinstance(thread_map, Mapping) else ():
        if name not in threads:
            yield Problem(
                f"thread_map names task {shown(name)}, which the schedule does not have (it "
                f"has: {listed(sorted(threads))}): correct the name, or take it out"
            )
    for name, thread in threads.items():
        if not isinstance(thread, str) or not is_label(thread):
            yield Problem(f"thread_map gives task {name!r} thread {shown(thread)}: {LABEL_RULE}")


class DelegatedPipeline(SWPipeline[IterContext]):
    """A pipeline whose tasks are run by a user-defined executor and cannot be replayed."""

    def enable_shortcut(self, *tasks: Any, with_: Any = None) -> None:
        """Refuse to replay a task.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "an executor of your own runs the tasks, and they cannot be replayed one by one: use "
            "executor=None or 'threaded' for shortcuts and profiles"
        )


def delegated(
    plan: PipelinePlan, schedule: Schedule, pool: StreamPool, executor: Executor, home: Home
) -> PipelinePlan:
    """Return the plan on the caller's thread whose tasks are run by a user-defined executor."""
    order = period_order(schedule)
    most = schedule.max_lookahead
    waits = stream_waits(schedule)
    stages = [Stage(tuple(t for t in order if t in stage.tasks)) for stage in schedule.stages]
    places = {task.name: TaskPlace(pool, home, most - task.lookahead) for task in order}
    # All tasks fill it, and the first call of a period empties it.
    recorded: dict[str, IterContext] = {}

    def call(_: IterContext) -> None:
        if not recorded:  # an earlier call in this period ran all tasks
            return
        contexts = PeriodContext()
        # A value that a task removes may still be in use on another stream: hold it for now.
        held: list[Any] = []
        for name, ctx in recorded.items():
            contexts[name] = TaskContext(ctx, places[name])
            held += vars(ctx).values()
        recorded.clear()
        period = next(iter(contexts.values())).iter_count

        def should_run(task: Task) -> bool:
            return task.name in contexts

        for stage in stages:
            if any(map(should_run, stage.tasks)):
                executor.execute_stage(stage, contexts, period, should_run, waits, pool)
        # The plan has this task on the default stream. This stream waits for all others here, so
        # that the engine's events cover all work that the executor has submitted.
        for name in pool.names:
            pool.order(DEFAULT, name)
        if any(map(pool.get, pool.names)):
            record_stream(held, torch.accelerator.current_stream())

    tasks: list[PipelineTask] = []
    for task in order:
        # Without replay, nothing is captured or restored.
        declared = [io for io in task.io if io.state is not None or io.reset is not None]
        effects = [replace(io, capture=None, restore=None) for io in declared]
        tasks.append(PipelineTask(task.name, partial(recorded.__setitem__, task.name), effects))
    entries = dict(plan.schedule)
    # Whichever lookaheads have a batch in a period, at least one of these calls runs after all
    # tasks. The later ones of the same period find nothing recorded.
    for lookahead in sorted({task.lookahead for task in order}, reverse=True):
        # A user may have given a task this very name.
        name = f"call at lookahead {lookahead}"
        while name in plan.schedule:
            name += "'"
        entries[name] = TaskSchedule(most - lookahead)
        # After a failure, ``reset`` drops the contexts that the failed period has left behind.
        tasks.append(PipelineTask(name, call, [DeclaredIO(reset=recorded.clear)]))
    return replace(
        plan,
        schedule=entries,
        order=[task.name for task in tasks],
        tasks=tuple(sorted(tasks, key=lambda task: entries[task.name].stage)),
    )
