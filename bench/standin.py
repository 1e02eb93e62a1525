"""Two usual ways to write a pipelined engine, with which swpipe is compared.

:class:`TaskQueues` hands over each task::

    progress() --(item per task)--> queue.Queue --> worker of the task's group
                                                      waits for the producers' Events
                                                      runs the task, sets its Event
                                                      counts it off, under a lock
    progress() <--(Event per slot)----------------------'

:class:`GroupQueues` hands over once per thread group and period, the least that threads need. It
runs plans of one thread group per stage, the last of which is the caller's::

    progress() --> SimpleQueue --> worker "read" --> SimpleQueue --> worker "copy" --.
    progress() runs the tasks of "default" <------------------- SimpleQueue <--------'

Both run plans of ``deps`` alone, and give the same results as swpipe under the same plan. They do
less (no stall report, no torch state, no streams, no shortcut), so the comparison does not flatter
swpipe.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask, TaskFn


class _Work(NamedTuple):
    """One run of a task, as its worker needs it."""

    name: str
    fn: TaskFn
    stage: int
    items: queue.Queue[Any]
    waits: tuple[list[threading.Event], ...]  # producer's events by slot
    done: list[threading.Event]  # by slot


class TaskQueues:
    """An engine with a ``queue.Queue`` item per task, and an ``Event`` per task and slot."""

    def __init__(self, plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> None:
        self._depth = self._slots = plan.depth
        groups = {s.thread_group for s in plan.schedule.values()}
        self._queues: dict[str, queue.Queue[Any]] = {g: queue.Queue() for g in groups}
        done = {n: [threading.Event() for _ in range(self._slots)] for n in plan.schedule}
        fns = {task.name: task.fn for task in tasks}
        self._work = [
            _Work(
                name=name,
                fn=fns[name],
                stage=plan.schedule[name].stage,
                items=self._queues[plan.schedule[name].thread_group],
                waits=tuple(done[p] for c, p in plan.deps if c == name),
                done=done[name],
            )
            for name in resolve_plan(plan).period_order
        ]
        self._lock = threading.Lock()
        self._contexts: list[IterContext | None] = [None] * self._slots
        self._remaining = [0] * self._slots
        self._retirable = [threading.Event() for _ in range(self._slots)]
        self._failure: BaseException | None = None
        self._period = 0
        self._total: int | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(items,), daemon=True)
            for items in self._queues.values()
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> TaskQueues:
        return self

    def __exit__(self, *failure: object) -> None:
        for items in self._queues.values():
            items.put(None)
        for thread in self._threads:
            thread.join()

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        """Admit a batch, hand out the period's tasks, retire the oldest iteration."""
        while True:
            p = self._period
            oldest = p - (self._depth - 1)
            if self._total is not None and oldest >= self._total:
                self._period, self._total = 0, None
                raise StopIteration
            self._period += 1
            if self._total is None:
                self._admit(p, iterator)
            for work in self._work:
                i = p - work.stage
                if i >= 0 and (self._total is None or i < self._total):
                    work.items.put((work, i))
            if oldest >= 0:
                return self._retire(oldest)

    def _admit(self, i: int, iterator: Iterator[Any]) -> None:
        try:
            batch = next(iterator)
        except StopIteration:
            self._total = i
            return
        slot = i % self._slots
        for work in self._work:
            work.done[slot].clear()
        self._retirable[slot].clear()
        self._remaining[slot] = len(self._work)
        self._contexts[slot] = IterContext(batch, i)

    def _retire(self, i: int) -> IterContext:
        slot = i % self._slots
        self._retirable[slot].wait()
        if self._failure is not None:
            raise self._failure
        ctx, self._contexts[slot] = self._contexts[slot], None
        assert ctx is not None
        return ctx

    def _serve(self, items: queue.Queue[Any]) -> None:
        while (item := items.get()) is not None:
            work, i = item
            slot = i % self._slots
            for events in work.waits:
                events[slot].wait()
            if self._failure is None:
                try:
                    work.fn(self._contexts[slot])
                except BaseException as error:  # noqa: BLE001 - handed to the caller
                    self._failure = error
            work.done[slot].set()
            with self._lock:
                self._remaining[slot] -= 1
                last = self._remaining[slot] == 0
            if last:
                self._retirable[slot].set()


class GroupQueues:
    """An engine with one ``queue.SimpleQueue`` item per thread group and period."""

    def __init__(self, plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> None:
        fns = {task.name: task.fn for task in tasks}
        stages: dict[int, list[TaskFn]] = {}
        for name in sorted(
            resolve_plan(plan).period_order, key=lambda name: plan.schedule[name].stage
        ):
            stages.setdefault(plan.schedule[name].stage, []).append(fns[name])
        *lanes, self._last = stages.values()
        self._queues = [queue.SimpleQueue[Any]() for _ in stages]
        self._depth = plan.depth
        self._admitted = self._in_flight = 0
        self._threads = [
            threading.Thread(target=self._serve, args=(lane, *ends), daemon=True)
            for lane, ends in zip(lanes, pairwise(self._queues), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> GroupQueues:
        return self

    def __exit__(self, *failure: object) -> None:
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        """Admit up to ``depth`` batches, and finish the oldest."""
        while self._in_flight < self._depth:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self._queues[0].put(IterContext(batch, self._admitted))
            self._admitted += 1
            self._in_flight += 1
        if not self._in_flight:
            self._admitted = 0
            raise StopIteration
        self._in_flight -= 1
        ctx = self._queues[-1].get()
        if isinstance(ctx, BaseException):
            raise ctx
        for fn in self._last:
            fn(ctx)
        return ctx

    def _serve(
        self, lane: list[TaskFn], items: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any]
    ) -> None:
        while (ctx := items.get()) is not None:
            if not isinstance(ctx, BaseException):
                try:
                    for fn in lane:
                        fn(ctx)
                except BaseException as error:  # noqa: BLE001 - handed to the caller
                    ctx = error
            done.put(ctx)
        done.put(None)
