"""What the user holds: tasks and a plan, run together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import torch

from swpipe._distributed.rank_checks import (
    Begun,
    answer_check,
    check_same_plan,
    check_same_shortcuts,
    tell_failure,
)
from swpipe._engine.exclusive import ExclusiveAccess
from swpipe._engine.iterations import Engine, PushedBatches, make_streams
from swpipe._engine.observers import Observer, Observers
from swpipe._engine.program import compile_plan
from swpipe._engine.program_text import format_program
from swpipe._engine.randomness import TaskSeeds
from swpipe._engine.run import Run
from swpipe._engine.serial import SerialLane
from swpipe._engine.waiting import Host
from swpipe._engine.watchdog import Watchdog, checked_timeout
from swpipe.analysis.verification import resolve_for_run, tasks_given
from swpipe.core.context import IterContext
from swpipe.core.drawing import format_grid, format_stages
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, TaskRef, names_of
from swpipe.device import Device, resolve
from swpipe.report import RunReport, run_to_end
from swpipe.shortcut import Shortcuts
from swpipe.trace import Trace
from swpipe.trace.perfetto import arrows_of
from swpipe.trace.recorder import Recorder


class SWPipeline:
    """Runs tasks under a plan.

    Use it as a context manager, or call ``close``. One thread at a time may call it.

    Args:
        plan: How to overlap.
        tasks: What to compute; may be omitted where the keys of the plan's schedule are tasks.
            Their order is that of a serial run, as far as the dependences allow.
        device: Where device work goes: None for the machine's accelerator, or else the CPU.
        seed: What the seeds of tasks with ``random=True`` derive from; None for
            ``torch.initial_seed()``.
        stall_timeout_s: Seconds without progress after which ``progress`` raises ``StallError``;
            None to wait for ever. Must be longer than the longest task.
        record_all_events: Record the device event of every task, needed or not, for debugging.
        check_ranks: With torch.distributed initialised, compare plans across ranks at the first
            fill, and shortcuts whenever some are enabled.
        host: Where threads come from; for tests.

    Raises:
        PlanError: The plan cannot run, or tasks could access a state that they declare in another
            order than serially; lists everything that is wrong with it.
        ValueError: The device is not on this machine, or ``stall_timeout_s`` is no time.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        tasks: Iterable[PipelineTask] | None = None,
        *,
        device: Device | torch.device | str | None = None,
        seed: int | None = None,
        stall_timeout_s: float | None = 600.0,
        record_all_events: bool = False,
        check_ranks: bool = True,
        host: Host | None = None,
    ) -> None:
        given = tasks_given(plan, tasks)
        self.plan = plan
        self.device = resolve(device)
        streams = self.device.has_streams
        resolved = resolve_for_run(plan, given, device=self.device.name, streams=streams)
        self._resolved = resolved
        by_name = {task.name: task for task in given}
        self.tasks = tuple(by_name[name] for name in resolved.serial_order)
        self._serial = SerialLane(self.tasks)
        self._check_ranks = self._alike = check_ranks
        self._stall_timeout_s = checked_timeout(stall_timeout_s)
        self._observers = Observers(self.device)
        self._engine = Engine(
            program=compile_plan(resolved, streams=streams, record_all=record_all_events),
            tasks=by_name,
            device=self.device,
            streams=make_streams(plan, self.device),
            host=host or Host(),
            shortcuts=Shortcuts(self.device),
            seeds=TaskSeeds(seed, self.device),
            observers=self._observers,
        )
        self._run: Run | None = None
        self._watchdog: Watchdog | None = None
        self._ended: Iterator[Any] | None = None
        self._drained: list[IterContext] = []  # not handed out: drain() failed after that
        self._next_iteration = 0
        self._pushed = PushedBatches()
        self._number = 0  # among the pipelines that were compared across ranks
        self._periods = 0  # begun, in all runs
        self._access = ExclusiveAccess()

    @property
    def in_flight(self) -> int:
        """How many iterations have been pulled and not been handed out."""
        return len(self._drained) + (0 if self._run is None else self._run.in_flight)

    @property
    def next_iteration(self) -> int:
        """The number of the next iteration, where none is in flight."""
        return self._next_iteration

    def fill_pipeline(self, iterator: Iterator[Any]) -> None:
        """Run the prologue: pull ``depth - 1`` batches, or as many as there are.

        Optional: otherwise the first ``progress`` does it. It raises what ``progress`` raises.
        """
        with self._access:
            if self._run is not None:
                raise RuntimeError(
                    f"the pipeline is full: {self.in_flight} iterations are in flight. Call "
                    "progress() with the iterator that it was filled from, or drain() first"
                )
            run = self._prepared(iterator)
            while run.period < self._engine.program.depth - 1 and not run.finished:
                self._advance(run)

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        """Run one period: admit a batch, run every task once, hand out the oldest iteration.

        Args:
            iterator: Where the batches come from; the same one until it is drained.

        Returns:
            The context of the oldest iteration. The caller's stream waits for all of its device
            work.

        Raises:
            StopIteration: All batches of the iterator have been handed out.
            RuntimeError: The pipeline is closed, or in use by another thread, or iterations of
                another iterator are in flight.
            StallError: Nothing moved for ``stall_timeout_s``.
            BaseException: Whatever a task or the iterator raised first, with a note of where. What
                was in flight is dropped, and the pipeline can be filled again. An iteration that
                was complete when another failed is handed out first; the next call raises.
        """
        with self._access:
            # If it called the iterator again instead, one that restarts would never end.
            ended, self._ended = self._ended, None
            if self._run is None and ended is iterator:
                raise StopIteration
            return self._next(self._prepared(iterator))

    def push(self, batch: Any) -> IterContext | None:
        """Admit one batch and run one period: ``progress`` for callers without an iterator.

        Returns:
            The context of the oldest iteration; None from the first ``depth - 1`` calls, which fill
            the pipeline.

        Raises:
            BaseException: As for ``progress``. The batch of a call that raises is dropped.
        """
        with self._access:
            run = self._prepared(self._pushed)
            self._pushed.batches = (batch,)
            try:
                return self._advance(run)
            finally:
                self._pushed.batches = ()

    def flush(self) -> list[IterContext]:
        """``drain`` for pushed batches; iterations of an iterator are refused."""
        if self._run is not None and self._run.iterator is not self._pushed:
            raise self._mixed(self._run, self._pushed)
        return self.drain()

    def drain(self) -> list[IterContext]:
        """Stop admitting; finish what is in flight, and hand it out, oldest first.

        The iterator keeps its other batches.

        Raises:
            BaseException: As for ``progress``. Contexts that were complete before are not lost: the
                next call hands them out.
        """
        with self._access:
            run = self._run
            if run is not None:
                run.stop_admitting()
                self._prepared(run.iterator)
                while not run.over:
                    self._drained.append(self._next(run))
                self._forget(run)
            contexts, self._drained = self._drained, []
            return contexts

    def iterate(self, loader: Iterable[Any]) -> Iterator[IterContext]:
        """Yield the context of every iteration over ``loader``, in order."""
        iterator = iter(loader)
        while True:
            try:
                ctx = self.progress(iterator)
            except StopIteration:
                return
            yield ctx
            del ctx  # this frame must not keep what the user drops

    def run(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` under the plan, with a progress bar where ``verbose``."""
        contexts = self.iterate(loader)
        return run_to_end(contexts, self.device, loader, "pipelined" if verbose else None)

    def run_one_serial_iter(self, batch: Any, iter_idx: int | None = None) -> IterContext:
        """Run every task on one batch, one by one, on this thread and the caller's stream.

        Seeds of tasks with ``random=True`` depend on the iteration's number, ``iter_idx``, from 0.
        If it is None, the number is ``next_iteration``, which then increases.
        """
        with self._access:
            self.check_idle("running serially")
            if iter_idx is not None:
                return self._serial.run(self._engine, IterContext(batch, iter_idx))
            ctx = self._serial.run(self._engine, IterContext(batch, self._next_iteration))
            self._next_iteration += 1
            return ctx

    def run_serial(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` serially; gives the same numbers as ``run``."""
        contexts = map(self.run_one_serial_iter, loader)
        return run_to_end(contexts, self.device, loader, "serial" if verbose else None)

    def enable_shortcut(self, *tasks: TaskRef) -> None:
        """Cache what each task's next run produces; replay that afterwards instead of running it.

        On several ranks, enable the same tasks on all of them, between the same two steps; they
        wait for each other here.

        Raises:
            ValueError: A task that this pipeline does not have.
            RuntimeError: Another rank enables other tasks, or continues without, or does not
                answer within ``stall_timeout_s``.
        """
        names, shortcuts = self.task_names(*tasks), self._engine.shortcuts
        if self._alike:
            timeout_s = math.inf if self._stall_timeout_s is None else self._stall_timeout_s
            wanted, begun = {*shortcuts.names, *names}, Begun(self._number, self._periods)
            check_same_shortcuts(self.plan.digest(), wanted, begun, timeout_s)
        shortcuts.enable(names)

    def disable_shortcut(self, *tasks: TaskRef) -> None:
        """Run tasks as usual again, and drop their caches; without arguments, of all tasks."""
        self._engine.shortcuts.disable(self.task_names(*(tasks or self.tasks)))

    @contextmanager
    def shortcut(self, *tasks: TaskRef) -> Iterator[None]:
        """Shortcut tasks within the block."""
        self.enable_shortcut(*tasks)
        try:
            yield
        finally:
            if tasks:
                self.disable_shortcut(*tasks)

    @property
    def shortcut_tasks(self) -> frozenset[str]:
        """Names of the tasks that are shortcut."""
        return frozenset(self._engine.shortcuts.names)

    def task_names(self, *tasks: TaskRef) -> tuple[str, ...]:
        """The names of some tasks; ValueError for one that this pipeline does not have."""
        names = names_of(tasks)
        for name in names:
            if name not in self._engine.tasks:
                known = ", ".join(task.name for task in self.tasks)
                raise ValueError(f"this pipeline has no task {name!r}; it has {known}")
        return names

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call ``observer`` around every task that runs within the block; several may observe."""
        return self._observers.adding(observer)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when each task runs, and where, within the block."""
        recorder = Recorder(self._engine.program, self.device, self._engine.streams)
        trace = Trace(arrows=arrows_of(self._resolved))
        try:
            with self.observe(recorder):
                yield trace
        finally:
            trace.spans = recorder.finish()

    def check_idle(self, purpose: str) -> None:
        """Raise RuntimeError if the pipeline is closed, or iterations are in flight."""
        if self.closed:
            raise RuntimeError(f"the pipeline is closed: make a new one before {purpose}")
        if self._run is not None:
            raise RuntimeError(
                f"{self.in_flight} iterations are in flight: finish their iterator, or call "
                f"drain(), before {purpose}"
            )

    @contextmanager
    def borrow(self) -> Iterator[None]:
        """Use an idle pipeline for measurements; afterwards it is as it was, also on failure.

        Within the block, tasks that are shortcut are cached anew, and the caches from before stay
        untouched. ``next_iteration`` is restored.
        """
        self.check_idle("borrowing it")
        engine, next_iteration = self._engine, self._next_iteration
        shortcuts = Shortcuts(self.device)
        shortcuts.enable(engine.shortcuts.names)
        self._engine = replace(engine, shortcuts=shortcuts)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first failure is the one to raise
                self.drain()
            raise
        finally:
            self._engine, self._next_iteration = engine, next_iteration

    def format_schedule(self, periods: int) -> str:
        """The iteration that each task works on in each of the first ``periods`` periods."""
        return format_grid(self.plan, self._resolved.period_order, periods)

    def format_stage_analysis(self) -> str:
        """Each stage's tasks, where they run and what they wait for."""
        return format_stages(self._resolved)

    def format_program(self, *, streams: bool | None = None) -> str:
        """What each thread group does in a period, and what it waits for; a line per group.

        If ``streams`` is None, the program is that for the pipeline's own device.
        """
        streams = self.device.has_streams if streams is None else streams
        return format_program(compile_plan(self._resolved, streams=streams))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._access.closed

    def close(self) -> None:
        """Stop the threads and drop what is in flight. The pipeline cannot be used any more."""
        self._access.closed = True
        run, self._run = self._run, None
        if run is not None:
            run.end()
        self._drained.clear()
        self._stop_watchdog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _prepared(self, iterator: Iterator[Any]) -> Run:
        """The run over this iterator, ready to be advanced by the calling thread."""
        run = self._run or self._begin(iterator)
        if run.iterator is not iterator:
            raise self._mixed(run, iterator)
        run.read_callers_settings()
        if self._watchdog is not None:
            self._watchdog.drive_from_here()
        return run

    def _begin(self, iterator: Iterator[Any]) -> Run:
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"progress() takes an iterator, not {type(iterator).__name__}: "
                "pass iter(loader), and the same one each time"
            )
        if self._check_ranks:
            self._number = check_same_plan(self.plan)
            self._check_ranks = False
        run = self._run = Run(self._engine, iterator, self._next_iteration)
        if self._stall_timeout_s is not None:
            on_idle = self._answer_others if self._number else None
            self._watchdog = Watchdog(run, self._stall_timeout_s, on_idle)
        if self._access.closed:
            self.close()
            raise RuntimeError("the pipeline was closed by another thread during this call")
        return run

    def _mixed(self, run: Run, iterator: Iterator[Any]) -> RuntimeError:
        source, end = "of another iterator", "finish it, or call drain()"
        if run.iterator is self._pushed:
            source, end = "of pushed batches", "call flush()"
        return RuntimeError(
            f"{run.in_flight} iterations {source} are in flight: {end} to get them, before "
            f"giving {'a batch to push()' if iterator is self._pushed else 'progress() a new one'}"
        )

    def _answer_others(self) -> None:
        answer_check(Begun(self._number, self._periods))

    def _next(self, run: Run) -> IterContext:
        while not run.over:
            ctx = self._advance(run)
            if ctx is not None:
                return ctx
        self._ended = None
        raise StopIteration

    def _advance(self, run: Run) -> IterContext | None:
        self._periods += 1
        try:
            ctx = run.advance()
        except BaseException as error:
            self._forget(run)
            tell_failure(error)
            raise
        if run.over:
            self._forget(run)
        return ctx

    def _forget(self, run: Run) -> None:
        run.end()
        self._next_iteration = run.iterations.first + run.admitted
        self._run = None
        self._ended = run.iterator if run.data_ended and run.retired else None
        self._stop_watchdog()

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
