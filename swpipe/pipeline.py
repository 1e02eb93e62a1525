"""What the user holds: tasks and a plan, run together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import torch

from swpipe._distributed.rank_checks import (
    Begun,
    answer_check,
    check_same_plan,
    check_same_shortcuts,
    tell_failure,
)
from swpipe._engine.exclusive import Turnstile
from swpipe._engine.iterations import Engine
from swpipe._engine.observers import active_observers
from swpipe._engine.program import compile_plan
from swpipe._engine.randomness import Draws
from swpipe._engine.run import Run
from swpipe._engine.serial import SerialLane
from swpipe._engine.torch_state import TorchState
from swpipe._engine.waiting import Host
from swpipe._engine.watchdog import Watchdog, checked_timeout
from swpipe.analysis.checks import check, tasks_given
from swpipe.analysis.races import check_states
from swpipe.core.context import IterContext
from swpipe.core.dependence import period_order, serial_order
from swpipe.core.drawing import format_grid, format_stages
from swpipe.core.plan import PipelinePlan, StreamSpec
from swpipe.core.task import PipelineTask, TaskRef, names_of
from swpipe.device.device import Device, plain, resolve
from swpipe.report import RunReport, run_to_end
from swpipe.shortcut import Shortcuts
from swpipe.trace import Trace
from swpipe.trace.perfetto import arrows_of
from swpipe.trace.recorder import Recorder


class SWPipeline:
    """Runs tasks under a plan.

    Use it as a context manager, or call ``close``.

    Args:
        plan: How to overlap.
        tasks: What to compute; may be left out where the plan's schedule has the tasks themselves
            as keys. Their order is that of a serial run, as far as the dependences allow.
        device: Where device work goes: None for the machine's accelerator, or else the CPU.
        seed: What the draws of tasks with ``random=True`` derive from; None for
            ``torch.initial_seed()``.
        stall_timeout_s: Seconds without any movement after which ``progress`` raises
            ``StallError``; None to wait for ever. Longer than the longest task.
        record_all_events: Record the device event of every task, needed or not, for hunting
            trouble.
        check_ranks: With torch.distributed initialised, compare plans across ranks at the first
            fill, and shortcuts whenever some are enabled.
        host: Where threads come from; for tests.

    Raises:
        PlanError: The plan cannot run, or tasks could touch a state that they declare in another
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
        check(plan, given, self.device.name)
        by_name = {task.name: task for task in given}
        self.tasks = tuple(by_name[name] for name in serial_order(plan, list(by_name)))
        check_states(plan, self.tasks, streams=self.device.has_streams)
        self._serial = SerialLane(self.tasks)
        self._check_ranks = self._alike = check_ranks
        self._stall_timeout_s = checked_timeout(stall_timeout_s)
        self._recorder: Recorder | None = None
        self._engine = Engine(
            program=compile_plan(
                plan, streams=self.device.has_streams, record_all=record_all_events
            ),
            tasks=by_name,
            device=self.device,
            streams=self._make_streams(),
            host=host or Host(),
            shortcuts=Shortcuts(self.device),
            draws=Draws(seed, self.device.type),
            observers=lambda: active_observers(self.device.type, self._recorder),
        )
        self._run: Run | None = None
        self._watchdog: Watchdog | None = None
        self._ended: Iterator[Any] | None = None
        self._drained: list[IterContext] = []  # and not handed out: drain() failed after that
        self._next_iteration = 0
        self._number = 0  # among those that were compared across ranks
        self._periods = 0  # begun, in all runs
        self._turnstile = Turnstile()

    def _make_streams(self) -> dict[Any, Any]:
        if not self.device.has_streams:
            return {}
        used = dict.fromkeys(s.stream for s in self.plan.schedule.values() if s.stream is not None)
        return {
            ref: plain(ref)
            if isinstance(ref, torch.Stream)
            else self.device.new_stream(self.plan.streams.get(ref, StreamSpec()))
            for ref in used
        }

    # ---------------------------------------------------------------- pipelined

    @property
    def in_flight(self) -> int:
        """How many iterations have been pulled and not been handed out."""
        return len(self._drained) + (0 if self._run is None else self._run.in_flight)

    def fill_pipeline(self, iterator: Iterator[Any]) -> None:
        """Run the prologue: pull ``depth - 1`` batches, or as many as there are.

        Optional: the first ``progress`` does it where this was not called.

        Raises:
            RuntimeError: Iterations are in flight already, or the pipeline is closed or in use
                elsewhere.
            BaseException: Whatever a task or the iterator raised.
        """
        with self._turnstile:
            if self._run is not None:
                raise RuntimeError(
                    f"the pipeline is full: {self.in_flight} iterations are in flight. Call "
                    "progress() with the iterator that it was filled from, or drain() first"
                )
            run = self._begin(iterator)
            self._prepare(run)
            while run.period < self._engine.program.depth - 1 and not run.finished:
                self._advance(run)

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        """One period: admit a batch, run every task once, hand out the oldest iteration.

        Args:
            iterator: Gives the batches; the same one until it is drained.

        Returns:
            The context of the oldest iteration. The caller's stream waits for all of its device
            work.

        Raises:
            StopIteration: All batches of the iterator have been handed out.
            RuntimeError: Misuse: closed, in use by another thread, or another iterator while
                iterations are in flight.
            StallError: Nothing moved for ``stall_timeout_s``.
            BaseException: Whatever a task or the iterator raised first, with a note of where. What
                was in flight is dropped, and the pipeline can be filled again. An iteration that
                was through when another failed is handed out first; the next call raises.
        """
        with self._turnstile:
            if self._run is None and self._told_the_end(iterator):
                raise StopIteration
            run = self._run or self._begin(iterator)
            if run.iterator is not iterator:
                raise RuntimeError(
                    f"{run.in_flight} iterations of another iterator are in flight: finish it, or "
                    "call drain() to get them, before giving progress() a new one"
                )
            self._prepare(run)
            return self._next(run)

    def drain(self) -> list[IterContext]:
        """Finish what is in flight without pulling more, and hand it out, oldest first.

        The iterator's further batches stay in it. With nothing in flight, the list is empty.

        Raises:
            BaseException: As for ``progress``. What came out before is not lost: the next call
                hands it out.
        """
        with self._turnstile:
            run = self._run
            if run is not None:
                run.stop_pulling()
                self._prepare(run)
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
            del ctx  # what the user lets go of must not live on in this frame

    def run(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` under the plan, with a progress bar where ``verbose``."""
        return run_to_end(
            self.iterate(loader), self.device, loader, "pipelined" if verbose else None
        )

    # ------------------------------------------------------------------- serial

    def run_one_serial_iter(self, batch: Any, iter_idx: int | None = None) -> IterContext:
        """Run every task on one batch, one by one, on this thread and the caller's stream.

        Args:
            batch: The batch.
            iter_idx: The iteration's number, from 0, on which the draws of tasks with
                ``random=True`` depend; None for the pipeline's next one, which is counted then.
        """
        with self._turnstile:
            self._check_idle()
            if iter_idx is not None:
                return self._serial.run(self._engine, IterContext(batch, iter_idx))
            ctx = self._serial.run(self._engine, IterContext(batch, self._next_iteration))
            self._next_iteration += 1
            return ctx

    def run_serial(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` serially; the same numbers as ``run`` gives."""
        label = "serial" if verbose else None
        return run_to_end(self._iterate_serially(loader), self.device, loader, label)

    def _iterate_serially(self, loader: Iterable[Any]) -> Iterator[IterContext]:
        for batch in loader:
            ctx = self.run_one_serial_iter(batch)
            del batch
            yield ctx
            del ctx

    # ----------------------------------------------------------------- shortcut

    def enable_shortcut(self, *tasks: TaskRef) -> None:
        """Keep what a task's next run produces; after that, put it back instead of running it.

        On several ranks, enable the same tasks on all of them, between the same two steps; they
        wait for each other here.

        Raises:
            ValueError: A task that this pipeline does not have.
            RuntimeError: Another rank enables other tasks, or goes on without, or does not come
                within ``stall_timeout_s``.
        """
        names, shortcuts = self._known(tasks), self._engine.shortcuts
        if self._alike:
            patience_s = math.inf if self._stall_timeout_s is None else self._stall_timeout_s
            wanted, begun = {*shortcuts.names, *names}, Begun(self._number, self._periods)
            check_same_shortcuts(self.plan.digest(), wanted, begun, patience_s)
        shortcuts.enable(names)

    def disable_shortcut(self, *tasks: TaskRef) -> None:
        """Run tasks as usual again, and let go of what was kept; without arguments, all of them."""
        self._engine.shortcuts.disable(self._known(tasks or self.tasks))

    @contextmanager
    def shortcut(self, *tasks: TaskRef) -> Iterator[None]:
        """Shortcut tasks within the block."""
        self.enable_shortcut(*tasks)
        try:
            yield
        finally:
            if tasks:
                self.disable_shortcut(*tasks)

    def _known(self, tasks: Sequence[TaskRef]) -> tuple[str, ...]:
        names = names_of(tasks)
        for name in names:
            if name not in self._engine.tasks:
                raise ValueError(
                    f"this pipeline has no task {name!r}; "
                    f"it has {', '.join(t.name for t in self.tasks)}"
                )
        return names

    # ------------------------------------------------------------------ looking

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record who runs when, within the block, whatever runs in it.

        Raises:
            RuntimeError: A trace is being recorded already.
        """
        if self._recorder is not None:
            raise RuntimeError("a trace is being recorded already: leave its block first")
        engine = self._engine
        recorder = self._recorder = Recorder(engine.program, self.device, engine.streams)
        trace = Trace(arrows=arrows_of(self.plan))
        try:
            yield trace
        finally:
            self._recorder = None
            trace.spans = recorder.finish()

    def format_schedule(self, periods: int) -> str:
        """The iteration that each task works on in each of the first ``periods`` periods."""
        return format_grid(self.plan, period_order(self.plan), periods)

    def format_stage_analysis(self) -> str:
        """Each stage's tasks, where they run and what they wait for."""
        return format_stages(self.plan, period_order(self.plan))

    # ------------------------------------------------------------------- ending

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._turnstile.closed

    def close(self) -> None:
        """Stop the threads and drop what is in flight. The pipeline cannot be used any more."""
        self._turnstile.closed = True
        run, self._run = self._run, None
        if run is not None:
            run.end()
        self._drained.clear()
        self._end_watch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ private

    def _check_idle(self) -> None:
        if self._run is not None:
            raise RuntimeError(
                f"{self.in_flight} iterations are in flight: finish their iterator, or call "
                "drain(), before running serially"
            )

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
            self._watchdog = Watchdog(
                run, self._stall_timeout_s, self._answer_others if self._number else None
            )
        if self._turnstile.closed:
            self.close()
            raise RuntimeError("the pipeline was closed by another thread during this call")
        return run

    def _prepare(self, run: Run) -> None:
        if self.device.has_streams and run.flights.caller_stream != self.device.current_stream():
            raise RuntimeError(
                "another stream is current than when the pipeline was filled: call drain() "
                "before switching, or make the same stream current"
            )
        if len(run.lanes) > 1:
            state = TorchState.of_this_thread(self.device.type)
            if state != run.state:  # workers tell a change by identity
                run.state = state
            run.variables = copy_context()
        if self._watchdog is not None:
            self._watchdog.drive_from_here()

    def _next(self, run: Run) -> IterContext:
        while not run.over:
            ctx = self._advance(run)
            if ctx is not None:
                return ctx
        self._ended = None
        raise StopIteration

    def _answer_others(self) -> None:
        answer_check(Begun(self._number, self._periods))

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

    def _told_the_end(self, iterator: Iterator[Any]) -> bool:
        """Whether the iterator has ended and its user has not been told; told once.

        Asked again instead, an iterator that begins anew after its end would never end.
        """
        ended, self._ended = self._ended, None
        return ended is iterator

    def _forget(self, run: Run) -> None:
        run.end()
        self._next_iteration = run.flights.first_iteration + run.admitted
        self._run = None
        self._ended = run.iterator if run.data_ended and run.retired else None
        self._end_watch()

    def _end_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
