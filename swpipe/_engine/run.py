"""Run a compiled program over one iterator: lanes, failure, cancellation.

    caller's thread                          one thread per worker group
    progress()                               _work()
      advance()                                while data may come:
        period: <admit> a b <retire> <--(1)-->   period: c d
      retired context --> user                 (2) failure anywhere: every wait raises Cancelled

    a group of two workers                   worker 0: c 0 d 0 ---> c 2 d 2 --->
                                             worker 1:    c 1 d 1 --(3)--> c 3 d 3

Guarantees
    - A lane runs its instructions in order, period by period; between lanes the program's host
      waits hold (1). A lane publishes its progress past an instruction for which others wait after
      the task has returned and its event is recorded, never before.
    - The first failure of any lane ends the run (2): it is kept, every counter is cancelled, no
      lane starts another task, and the caller gets the failure itself, with a note that names task,
      iteration and group. A KeyboardInterrupt or SystemExit on the caller's thread is raised even
      after another failure, and any exception on the caller's thread even after ``stop``.
    - Each of several workers runs the periods of its own iterations. A lane that waits for their
      lane waits for the worker whose turn the period is. A worker that fails first waits until the
      others have passed the earlier iterations (3), so that the failure of the earliest iteration
      is kept.
    - ``InFlightIterations.total``, the number of iterations, is set before the end of the data is
      published (``swpipe._engine.admission``). Every task comes after the pull of its iteration,
      so each lane knows whether that iteration exists.
    - ``<retire>`` hands out a context and forgets it in the same step; a failure that comes right
      after it is raised by the next call.
    - ``stop`` sets flags and takes no lock: a signal handler may call it. ``end`` stops the threads
      and drops the iterations. It may be interrupted at any place, and called again, until
      ``ended``.
    - A call that is interrupted anywhere by an exception (Ctrl-C) leaves ``interrupted`` set: only
      ``end`` may be called on the run then.

Assumptions
    - One thread at a time drives a run; the pipeline sees to that.
    - A task's function returns in the end. Python cannot end a thread from outside: a thread whose
      task does not return is left running, is named in the failure's note or a warning, and ends at
      its next instruction or, when the interpreter exits, at its next line of Python.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from itertools import chain
from typing import Any, NamedTuple

from swpipe._engine.admission import Admission
from swpipe._engine.bind import Step, build_step, observe, wait_for_events, with_torch_state
from swpipe._engine.interruption import raise_in
from swpipe._engine.iterations import FOREVER, Engine, InFlight, InFlightIterations, reset_states
from swpipe._engine.process import add_run, remove_run
from swpipe._engine.release import finish, warn_of_missing, with_releases
from swpipe._engine.torch_state import (
    ThreadTorchState,
    current_mode,
    mode_in_words,
    torch_state,
)
from swpipe._engine.waiting import Cancelled, HostThread, ProgressCounter
from swpipe.core.context import TypedContext
from swpipe.core.plan import PULL
from swpipe.errors import StallError, add_note
from swpipe.program import BEGIN, OWN, SOURCES, Instruction, Lane

JOIN_GRACE_S = 0.1
"""The time in seconds, in all, that a run that fails or is closed waits for running tasks."""

# The same time for a finished run, whose threads are past their last task.
_FINISH_S = 10.0
# The time in which an interrupt that the watchdog has sent arrives.
_LEAVE_S = 1.0

CLOSED_IN_CALL = "the pipeline was closed during this call, by another thread, handler or task"


class BoundWait(NamedTuple):
    """A wait for another lane's progress: ``period * size + base``."""

    # Sleeps until the lane has passed a number of instructions, counted over all periods.
    wait: Callable[[int], None]
    # The number of instructions of the lane that is waited for.
    size: int
    # The lane's progress within a period once it has passed the instruction.
    base: int


class BoundInstruction(NamedTuple):
    """An instruction with its waits and its function, as ``_run_period`` executes it."""

    waits: tuple[BoundWait, ...]
    stage: int
    step: Step
    publish: bool
    ins: Instruction


class LaneRunner:
    """One thread that runs a lane; ``period`` and ``position`` give its current instruction."""

    def __init__(self, lane: Lane, worker: int, progress: ProgressCounter) -> None:
        self.lane = lane
        self.worker = worker
        self.group = lane.group
        self.instructions = lane.instructions
        self.size = len(lane.instructions)
        # Counts the instructions that were passed, over all periods.
        self.progress = progress
        self.period = 0
        self.position = 0
        self.ops: tuple[BoundInstruction, ...] = ()
        self.observed_ops: tuple[BoundInstruction, ...] = ()
        self.torch_state: ThreadTorchState | None = None
        self.thread: HostThread | None = None

    @property
    def instruction(self) -> Instruction:
        """The instruction that the lane is at."""
        return self.instructions[self.position]


class Run:
    """One run over one iterator, from the prologue to the last retirement or the first failure."""

    def __init__(
        self,
        engine: Engine,
        iterator: Iterator[Any],
        source: Iterator[Any],
        first_iteration: int,
    ) -> None:
        self.engine = engine
        self.iterations = InFlightIterations(engine, first_iteration)
        self.admission = Admission(self.iterations, iterator, source)
        self.retired = 0
        self.period = 0
        self.mode = current_mode(engine.mode())
        # A dictionary, because its atomic ``setdefault`` keeps the first failure without a lock.
        self._failure: dict[str, BaseException] = {}
        self.stalled: StallError | None = None
        self.stopping = False
        self.draining = False
        self.flushing = False
        self.ending = False
        self.ended = False
        # True inside ``start`` and ``advance``, and after one of them was interrupted.
        self.in_call = True
        # The thread that is inside ``advance``. It enters itself and removes itself, unless the
        # watchdog has removed it, in order to interrupt it. Removal is atomic, so exactly one of
        # the two removes it.
        self.driver: dict[str, int] = {}
        self._handed_out: TypedContext | None = None
        # The workers of each lane, in the order of the program's lanes.
        self.groups = tuple(
            tuple(LaneRunner(lane, n, engine.host.counter()) for n in range(lane.workers))
            for lane in engine.program.lanes
        )
        self.lanes = tuple(chain.from_iterable(self.groups))
        for lane in self.lanes:
            lane.torch_state = None if lane is self.lanes[0] else ThreadTorchState()
            lane.ops = tuple(self._op(ins, lane, observed=False) for ins in lane.instructions)
            lane.observed_ops = tuple(self._op(x, lane, observed=True) for x in lane.instructions)

    def _op(self, ins: Instruction, lane: LaneRunner, *, observed: bool) -> BoundInstruction:
        waits = []
        for wait in ins.host_waits:
            first, *others = self.groups[wait.lane]
            passed: Callable[[int], None] = first.progress.wait
            if others:
                passed = functools.partial(self._wait_for_turn, wait.lane)
            base = wait.position + 1 - wait.lag * first.size
            waits.append(BoundWait(passed, first.size, base))
        if ins.task == BEGIN:
            step: Step = lambda i: None  # noqa: E731 - only a place that worker lanes wait for
        elif ins.task in SOURCES:
            step = self.admission.step(ins, observed=observed)
        elif ins.task in OWN:
            step = self._retire_step(ins)
            if observed:
                step = observe(self.iterations, ins, step)
        else:
            task = self.engine.tasks[ins.task]
            in_turn = functools.partial(self._let_earlier_pass, lane)
            step = build_step(self.iterations, ins, task, in_turn, observed=observed)
            step = with_releases(self.iterations, ins, step, lane.worker)
        if lane.torch_state is not None:
            step = with_torch_state(self.iterations, lane.torch_state, step)
        return BoundInstruction(tuple(waits), ins.stage, step, ins.publish, ins)

    def _order_streams_after_the_callers(self) -> None:
        """Make all streams wait for what the caller has submitted, such as initialisation."""
        begin = self.engine.device.new_event()
        begin.record(self.iterations.caller_stream)
        for stream in self.engine.streams.values():
            begin.wait(stream)

    def start(self) -> None:
        """Start the threads. Call it once, before the first ``advance``."""
        add_run(self)
        self._order_streams_after_the_callers()
        for lane in self.lanes[1:]:
            target = functools.partial(self._work, lane)
            name = f"swpipe-{lane.lane.threads[lane.worker]}"
            lane.thread = self.engine.host.start(name, target)
        self.in_call = False

    @property
    def failure(self) -> BaseException | None:
        """The first failure of any lane; None after ``end``."""
        return self._failure.get("first")

    @property
    def interrupted(self) -> bool:
        """Whether the last call was interrupted; meaningful only between calls."""
        return self.in_call or self.ending or (self.stopping and self.failure is None)

    @property
    def finished(self) -> bool:
        """Whether every iteration of the data was handed out."""
        return self.retired >= self.iterations.total

    @property
    def over(self) -> bool:
        """Whether the run is finished and has no failure left to raise."""
        return self.retired >= self.iterations.total and not self._failure

    @property
    def in_flight(self) -> int:
        """The number of iterations that were admitted and not handed out.

        Iterations beyond the end of the data do not count once the end is known.
        """
        return min(self.admission.admitted, self.iterations.total) - self.retired

    def read_callers_settings(self) -> None:
        """Read the calling thread's settings, for the iterations that are admitted from now on.

        Raises:
            RuntimeError: Iterations in flight were admitted in another mode or stream.
        """
        device = self.engine.device
        mode = current_mode(self.engine.mode())
        if mode != self.mode:
            if self.in_flight:
                raise RuntimeError(
                    f"the iterations in flight ({self.in_flight}) were admitted with "
                    f"{mode_in_words(self.mode)}, and this call is made with "
                    f"{mode_in_words(mode)}: an iteration keeps its mode. Finish them in their "
                    "mode before you change it: call drain(), or progress() to the end of their "
                    "iterator"
                )
            self.mode = mode
        if self.iterations.caller_stream != device.current_stream():
            raise RuntimeError(
                "the current stream is not the one under which the pipeline was filled: make that "
                "stream current, or call drain() before switching"
            )
        if len(self.lanes) > 1:
            # Workers compare states by identity, so an unchanged state has to stay the same object.
            self.admission.state = torch_state(device.autocast_types, self.admission.state)
            self.admission.variables = copy_context()

    def advance(self) -> TypedContext | None:
        """Run one period of the default lane, and return the context that it retired, if any.

        Raises the first failure of the run, unchanged, which ends the run. If the same period has
        retired a context, the context is returned and the next call raises the failure.
        """
        self.in_call = True
        lane = self.lanes[0]
        self.driver["thread"] = threading.get_ident()
        try:
            try:
                device = self.engine.device
                if device.has_streams:
                    with device.on(self.iterations.caller_stream):
                        self._run_period(lane, self.period)
                else:
                    self._run_period(lane, self.period)
                self.period += 1
            finally:
                self._leave()
        except BaseException as error:
            self.fail(error, lane)
            # If there is a context to hand out, the next call raises the failure. After ``close``
            # there is no next call, so the failure is raised now.
            if self._goes_first(error) and (self._handed_out is None or self.failure is None):
                raise
        handed_out = self._handed_out
        self._handed_out = None
        if handed_out is not None:
            # An exception arrived before ``_leave`` removed this thread.
            if self.driver:
                self._leave()
        else:
            if self.failure is not None:
                raise self.failure
            if self.stopping:
                raise RuntimeError(CLOSED_IN_CALL)
        self.in_call = False
        return handed_out

    def _goes_first(self, error: BaseException) -> bool:
        """Return whether an error of the caller's thread takes precedence over another failure."""
        # After a stall, the error is the interrupt that the watchdog has sent.
        if isinstance(error, Cancelled) or self.stalled is not None:
            return False
        return self.failure is None or not isinstance(error, Exception)

    def _leave(self) -> None:
        # If the watchdog has taken the entry, its interrupt is on the way. It is awaited here, so
        # that it arrives neither while ``advance`` handles a failure nor after it has returned.
        if self.driver.pop("thread", None) is None:
            time.sleep(_LEAVE_S)

    def settle(self) -> None:
        """Wait until the batches of all admitted iterations are pulled, or the data ends.

        If the run fails meanwhile, the next call raises the failure.
        """
        pull = self.engine.program.instructions.get(PULL)
        if pull is None or self.finished:
            return
        admitted, (lane,) = self.admission.admitted, self.groups[pull.lane]
        # The watchdog only watches a run while a call is under way.
        self.in_call = True
        with suppress(Cancelled):
            lane.progress.wait((admitted - 1 + pull.stage) * lane.size + pull.position + 1)
        self.in_call = False

    def stop_admitting(self) -> None:
        """Stop admitting iterations; those in flight are finished."""
        self.draining = True
        self.iterations.total = min(self.iterations.total, self.admission.admitted)

    def _run_period(self, lane: LaneRunner, period: int) -> None:
        lane.period = period
        iterations = self.iterations
        observers = self.engine.observers()
        passed = period * lane.size
        # Both lists are composed in advance: a run without observers calls none of their layers.
        ops = lane.observed_ops if observers else lane.ops
        for position, (waits, stage, step, publish, ins) in enumerate(ops):
            lane.position = position
            i = period - stage
            for observer in observers:
                observer.arrive(ins, iterations.first + i)
            for wait, size, offset in waits:
                wait(period * size + offset)  # (1)
            # In the prologue and epilogue ``i`` lies outside the run: the lane waits and publishes,
            # but calls no task.
            if 0 <= i < iterations.total:
                if self.stopping:
                    raise Cancelled
                step(i)
            if publish:
                lane.progress.advance(passed + position + 1)

    def _work(self, lane: LaneRunner) -> None:
        # The stage of ``<retire>``, which is the last instruction of an iteration.
        last_stage = self.engine.program.depth - 1
        try:
            self.engine.device.use_on_this_thread()
            first = self.iterations.first
            turn = lane.lane.turn
            step = lane.lane.workers
            # Start at the first period that is this worker's turn.
            period = next(p for p in range(step) if turn(first + p) == lane.worker)
            # Go to the last period of the run, even where this lane has no task left by then: a
            # wait for this lane may stand for a wait for a third lane that it implies.
            while period - last_stage < self.iterations.total and not self.ended:
                self._run_period(lane, period)
                period += step
        except BaseException as error:  # noqa: BLE001 - kept for the caller (2)
            with suppress(Cancelled):
                self._let_earlier_pass(lane)
            self.fail(error, lane)
        else:
            # This lane runs no further periods, so no lane has to wait for them.
            lane.progress.advance(FOREVER)
        finally:
            if lane.torch_state is not None:
                lane.torch_state.reset()

    def _let_earlier_pass(self, lane: LaneRunner) -> None:
        """Wait until all iterations before the worker's own have passed its lane.

        Raises:
            Cancelled: The run has failed or was stopped.
        """
        for period in range(max(0, lane.period - lane.lane.workers + 1), lane.period):
            worker = self.worker(lane.instruction.lane, period)
            worker.progress.wait((period + 1) * lane.size)  # (3)

    def _wait_for_turn(self, lane: int, count: int) -> None:
        """Wait until the worker whose turn the period is has reached a count of instructions."""
        period = (count - 1) // self.groups[lane][0].size
        self.worker(lane, period).progress.wait(count)

    def worker(self, lane: int, period: int) -> LaneRunner:
        """Return the worker of a lane of the program whose turn a period is."""
        workers = self.groups[lane]
        return workers[workers[0].lane.turn(self.iterations.first + period)]

    def _retire_step(self, ins: Instruction) -> Step:
        iterations = self.iterations
        depth = self.engine.program.depth
        releases = self.engine.releases
        wait = (
            wait_for_events(iterations, ins, iterations.caller_stream)
            if self.engine.device.has_streams
            else None
        )

        def retire(i: int) -> None:
            iteration: InFlight = iterations.slots[i % depth]
            if wait is not None:
                # The caller may use the context on its stream, which waits for the last tasks of
                # the iteration.
                wait(i)  # the caller's stream, for all sinks
                self._hold(iteration)
                self._mark_end(i)
            if releases is not None:
                finish(iteration.ctx, releases)
                if i == 0:
                    warn_of_missing(iteration.ctx, releases)
            iterations.slots[i % depth] = None
            self.retired += 1
            self._handed_out = iteration.ctx

        return retire

    def _hold(self, iteration: InFlight) -> None:
        self.engine.device.hold(
            (*vars(iteration.ctx).values(), *iteration.held), self.iterations.all_streams
        )

    def _mark_end(self, i: int) -> None:
        if self.engine.program.launch_limit is not None:
            ends = self.engine.ends
            slot = self.engine.end_slot(self.iterations.first + i)
            end = ends[slot] = ends.get(slot) or self.engine.device.new_event()
            end.record(self.iterations.caller_stream)

    def fail(self, error: BaseException, lane: LaneRunner) -> None:
        """Keep the first failure, wake all waiting threads, and add a note of where it happened."""
        if isinstance(error, Cancelled):
            return
        if isinstance(error, StopIteration):
            # Raised by ``progress``, StopIteration means the end of the data: a task's
            # StopIteration would end the loop silently (compare PEP 479).
            cause = error
            error = RuntimeError(
                "a task raised StopIteration, which only the iterator may raise: catch it in the "
                "task"
            )
            error.__cause__ = cause
        self.stop(error)
        first = self.failure
        if first is None or first is error:
            add_note(error, f"swpipe: {self._place(lane)}")
        elif not isinstance(error, Exception):
            add_note(error, f"swpipe: after {type(first).__name__}: {first}")
            if lane is self.lanes[0] and self.stalled is None:
                # A KeyboardInterrupt of the caller's thread replaces an earlier failure.
                self._failure["first"] = error  # the caller's, also where the next call raises it

    def _place(self, lane: LaneRunner) -> str:
        if lane.instruction.task in SOURCES:
            number = self.iterations.first + self.admission.pulled
            return f"pulling the batch of iteration {number}"
        number = lane.period - lane.instruction.stage
        which = f"iteration {self.iterations.first + number}" if number >= 0 else "no iteration yet"
        return f"at task {lane.instruction.task!r}, {which}, thread group {lane.group!r}"

    def stop(self, error: BaseException | None = None) -> None:
        """Tell all lanes to stop, and keep the first error given for the caller."""
        if error is not None and not self.stopping:
            self._failure.setdefault("first", error)
        self.stopping = True
        for lane in self.lanes:
            lane.progress.cancel()
        self.admission.cancel()
        self.iterations.generators.cancel()

    def end(self) -> None:
        """Stop the threads, wait for them, and drop the iterations in flight.

        It may be called again.
        """
        if self.ended:
            return
        if not self.finished:
            self.stop()
        self.ending = True
        self.lanes[0].progress.advance(FOREVER)
        # Order matters: the threads end first, then the generators are restored, then memory is
        # held. An interruption leaves ``ended`` False, and the next call repeats all of it.
        self.join(JOIN_GRACE_S if self.stopping else _FINISH_S)
        self.iterations.generators.end()
        self.iterations.hold_waiting()
        if not self.finished:
            self._abandon()
            self._reset_states()
        self.iterations.clear()
        self.ended = True
        # The failure's traceback refers to this run.
        self._failure.clear()
        if not self.left_inside():
            for lane in self.lanes:
                # The composed functions refer to this run and so to the data: break the reference
                # cycle.
                lane.ops = lane.observed_ops = ()
        remove_run(self)

    def left_inside(self) -> list[str]:
        """Return descriptions of the threads that have not ended and of their tasks."""
        return [
            f"thread group {lane.group!r} is still inside task {lane.instruction.task!r} of "
            f"iteration {self.iterations.first + lane.period - lane.instruction.stage}"
            for lane in self.lanes[1:]
            if lane.thread is not None and lane.thread.is_alive()
        ]

    def join(self, grace_s: float) -> None:
        """Wait for the threads to end, for at most ``grace_s`` seconds in all."""
        deadline = time.monotonic() + grace_s
        for lane in self.lanes[1:]:
            if lane.thread is not None and lane.thread.ident != threading.get_ident():
                lane.thread.join(max(0, deadline - time.monotonic()))

    def forget_in_fork(self) -> None:
        """Mark the run as ended in a forked child.

        The threads and the device work are the parent's.
        """
        self.stopping = self.ended = True
        for lane in self.lanes:
            lane.thread = None
        self._failure.clear()
        self.iterations.clear()

    def cut_short(self) -> None:
        """Raise ``Cancelled`` in threads that still run, at their next line of Python."""
        for lane in self.lanes[1:]:
            if lane.thread is not None and lane.thread.is_alive() and lane.thread.ident:
                raise_in(lane.thread.ident, Cancelled)

    def _reset_states(self) -> None:
        """Call the ``reset`` of all tasks.

        They forget what they keep for the iterations in flight.
        """
        try:
            reset_states(self.engine.tasks.values(), self.failure)
        # The error of a user's reset goes to the caller, and the resets are not called again.
        except Exception:
            self.ended = True
            raise

    def _abandon(self) -> None:
        """Hold the memory in flight, and order the caller's next work after its device work."""
        for iteration in self.iterations.slots:
            if iteration is not None:
                self._hold(iteration)
        try:
            for stream in self.engine.streams.values():
                end = self.engine.device.new_event()
                end.record(stream)
                end.wait(self.iterations.caller_stream)
            for i in range(self.retired, self.admission.pulled):
                self._mark_end(i)
        # After a device error, streams may refuse any further call: the first failure counts.
        except Exception as error:
            if self.failure is None:
                self.ended = True
                raise
            add_note(self.failure, f"swpipe: the device's streams could not be joined: {error}")
