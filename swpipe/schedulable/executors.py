"""Which thread submits which task, and what stands in for an executor of the user's own.

The executors that are here say only that: the engine of swpipe runs the tasks. Their
``execute_stage`` is for executors that wrap them (``swpipe.schedulable.delegation``), and runs the
tasks on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from swpipe.core.messages import listed, shown
from swpipe.core.task import LABEL_RULE, is_label
from swpipe.errors import Problem
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import Stage
from swpipe.schedulable.slot_context import PeriodContext
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool

ThreadMap: TypeAlias = (
    Literal["by_stream", "per_task"] | Mapping[str, str] | Callable[[Task], str] | None
)

Waits: TypeAlias = Mapping[str, Sequence[str]]
"""Task to the streams whose work its own stream waits for."""


@runtime_checkable
class Executor(Protocol):
    """What runs the tasks of a period (seed section 9.3)."""

    def execute_stage(
        self,
        stage: Stage,
        ctx: PeriodContext,
        iter_count: int,
        should_run: Callable[[Task], bool],
        waits: Waits,
        pool: StreamPool,
    ) -> Any:
        """Run the tasks of ``stage`` that should run, in order, each with ``ctx.of(task)``."""

    def shutdown(self) -> None:
        """The pipeline is shut down."""


class SequentialExecutor:
    """All tasks on the thread that calls ``progress``."""

    def execute_stage(
        self,
        stage: Stage,
        ctx: PeriodContext,
        iter_count: int,
        should_run: Callable[[Task], bool],
        waits: Waits,
        pool: StreamPool,
    ) -> None:
        """Run the tasks on the calling thread, each on its stream after what it waits for."""
        for task in filter(should_run, stage.tasks):
            for name in waits.get(task.name, ()):
                order_streams(pool, task.stream, name)
            with pool.use(task.stream):
                task.run(ctx.of(task))

    def shutdown(self) -> None:
        """Nothing is left to do."""


class ThreadedExecutor(SequentialExecutor):
    """Each task on the thread that ``thread_map`` names (seed section 4.1).

    Thread ``"default"`` is the caller's. There is one thread for each other name.

    Args:
        thread_map: None or ``"by_stream"``: the stream's name is the thread's. ``"per_task"``: each
            task has its own. A dict of task name to thread, in which ``"default"`` is the thread of
            all others. Or a function of the task that returns the thread's name.
        max_workers: The most threads besides the caller's; a schedule that needs more is refused.
            None for any number.

    Raises:
        TypeError: ``thread_map`` or ``max_workers`` is of another kind.
        ValueError: ``thread_map`` is another string, or ``max_workers`` below 1.
    """

    def __init__(self, thread_map: ThreadMap = None, max_workers: int | None = None) -> None:
        if isinstance(thread_map, str) and thread_map not in ("by_stream", "per_task"):
            raise ValueError(
                f"thread_map is {shown(thread_map)}: give 'by_stream', 'per_task', a dict, or a "
                "function of the task"
            )
        if not (thread_map is None or isinstance(thread_map, str | Mapping | Callable)):
            raise TypeError(
                f"thread_map is {shown(thread_map)}: give 'by_stream', 'per_task', a dict of task "
                "name to thread, or a function of the task"
            )
        if max_workers is not None and type(max_workers) is not int:
            raise TypeError(f"max_workers is {shown(max_workers)}: give an integer, or None")
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}: give 1 or more, or None")
        self.thread_map = thread_map
        self.max_workers = max_workers

    def thread_of(self, task: Task) -> str:
        """The name of the task's thread, as the map has it."""
        if self.thread_map in (None, "by_stream"):
            return task.stream
        if self.thread_map == "per_task":
            return task.name
        if isinstance(self.thread_map, Mapping):
            return self.thread_map.get(task.name, DEFAULT)
        return self.thread_map(task)  # type: ignore[operator]


def order_streams(pool: StreamPool, later: str, sooner: str) -> None:
    """Make the stream ``later`` wait for what ``sooner`` was given; the caller's is current."""
    streams = [pool.get(name) for name in (later, sooner)]
    if any(stream is not None for stream in streams):
        current = torch.accelerator.current_stream()
        after, before = (current if stream is None else stream for stream in streams)
        after.wait_stream(before)


def checked_executor(executor: Any) -> Executor:
    """The executor that is meant.

    Raises:
        TypeError: It has not the two methods.
    """
    if executor is None:
        return SequentialExecutor()
    if executor == "threaded":
        return ThreadedExecutor()
    if isinstance(executor, type) or not all(
        callable(getattr(executor, name, None)) for name in ("execute_stage", "shutdown")
    ):
        raise TypeError(
            f"executor is {shown(executor)}: give None, 'threaded', an executor, or an object with "
            "the methods execute_stage and shutdown"
        )
    return executor  # type: ignore[no-any-return]


def is_ours(executor: Executor) -> bool:
    """Whether the engine runs the tasks: it does not where ``execute_stage`` is the user's own."""
    return getattr(type(executor), "execute_stage", None) is SequentialExecutor.execute_stage


def threads_of(executor: Executor, tasks: Sequence[Task]) -> tuple[dict[str, str], list[Problem]]:
    """Task to thread, and what is wrong with the map."""
    if not isinstance(executor, ThreadedExecutor) or not is_ours(executor):
        return {task.name: DEFAULT for task in tasks}, []
    threads = {task.name: executor.thread_of(task) for task in tasks}
    problems = [*_map_problems(executor.thread_map, threads)]
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
    if isinstance(thread_map, Mapping):
        for name in thread_map:
            if name not in threads:
                yield Problem(
                    f"thread_map names task {shown(name)}, which the schedule does not have (it "
                    f"has: {listed(sorted(threads))}): correct the name, or take it out"
                )
    for name, thread in threads.items():
        if not isinstance(thread, str) or not is_label(thread):
            yield Problem(f"thread_map gives task {name!r} thread {shown(thread)}: {LABEL_RULE}")
