"""Run a compiled program over one iterator: lanes, failure, cancellation.

    caller's thread                          one thread per worker group
    progress()                               _work()
      advance()                                while data may come:
        turn: <admit> a b <retire>  <--(1)-->    turn: c d
      retired context --> user                 (2) failure anywhere: every wait raises Cancelled

Guarantees
    - A lane passes its instructions in order, period by period; between lanes the program's host
      waits hold (1). A lane that has passed an instruction for which others wait says so after the
      task has returned and its event is recorded, never before.
    - The first failure of any lane ends the run (2): it is kept, every signal is cancelled, no lane
      begins another task, and the caller gets the failure itself, with a note that names task,
      iteration and group.
    - ``Flights.total``, the number of iterations, is set before ``<admit>`` publishes that the data
      has ended; every task comes after ``<admit>`` of its iteration, and so knows whether that
      iteration exists.
    - A context is handed out by ``<retire>`` and forgotten in the same step; a failure that comes
      right after it waits for the next call.
    - At the interpreter's end every run is ended: a worker that was then cut off inside torch would
      abort the process.

Assumptions
    - One thread at a time drives a run; the pipeline sees to that.
    - A task's function returns in the end. Python cannot end a thread from outside: one that does
      not return is left behind, named in the failure's note, and ends at its next instruction.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import Context
from typing import Any, NamedTuple

from swpipe._engine.bind import Step, build_step, dress, observe, wait_for_events
from swpipe._engine.iterations import FOREVER, Engine, Flight, Flights
from swpipe._engine.program import ADMIT, RETIRE, Instruction, Lane
from swpipe._engine.torch_state import TorchState, Wardrobe
from swpipe._engine.waiting import Cancelled, HostThread, Signal
from swpipe.core.context import IterContext
from swpipe.device.device import Event

JOIN_GRACE_S = 0.1
"""How long a failing or closing run waits, in all, for tasks inside their functions."""

EXIT_GRACE_S = 10.0
"""The same at the end of the interpreter, where a thread that is cut off inside torch aborts the
process."""

_begun: weakref.WeakSet[Run] = weakref.WeakSet()
"""Every run that somebody knows of, its own threads among them."""


class _HostWait(NamedTuple):
    signal: Signal
    size: int  # instructions in the lane that is waited for
    base: int  # its progress within a period once it has passed the instruction


class _Op(NamedTuple):
    """One instruction, bound: what ``turn`` walks over."""

    waits: tuple[_HostWait, ...]
    stage: int
    step: Step
    publish: bool
    ins: Instruction


class LaneRunner:
    """A lane at work. ``period`` and ``position`` say where it is, for reports and the watchdog."""

    def __init__(self, lane: Lane, signal: Signal) -> None:
        self.group = lane.group
        self.instructions = lane.instructions
        self.size = len(lane.instructions)
        self.signal = signal
        self.period = 0
        self.position = 0
        self.ops: tuple[_Op, ...] = ()
        self.observed_ops: tuple[_Op, ...] = ()
        self.wardrobe: Wardrobe | None = None
        self.thread: HostThread | None = None

    @property
    def instruction(self) -> Instruction:
        """Where the lane is."""
        return self.instructions[self.position]


class Run:
    """One trip over one iterator: from the fill to the last retirement, or to the first failure."""

    def __init__(self, engine: Engine, iterator: Iterator[Any], first_iteration: int) -> None:
        self.engine = engine
        self.iterator = iterator
        self.flights = Flights(engine, first_iteration)
        self.admitted = 0
        self.retired = 0
        self.period = 0
        self.state: TorchState | None = None
        self.variables: Context | None = None
        self._sources: list[Event | None] = [None] * engine.program.depth
        self.failure: BaseException | None = None
        self.stopping = False
        self.data_ended = False
        self.driving = False
        self.lock = threading.Lock()
        self._handed_out: IterContext | None = None
        self._any_draws = any(task.random for task in engine.tasks.values())
        self.lanes = tuple(LaneRunner(lane, engine.host.signal()) for lane in engine.program.lanes)
        for lane in self.lanes:
            self._bind(lane)
        self._start()

    # ------------------------------------------------------------------ making

    def _bind(self, lane: LaneRunner) -> None:
        wardrobe = lane.wardrobe = None if lane is self.lanes[0] else Wardrobe()
        lane.ops = tuple(self._op(ins, wardrobe, observed=False) for ins in lane.instructions)
        lane.observed_ops = tuple(
            self._op(ins, wardrobe, observed=True) for ins in lane.instructions
        )

    def _op(self, ins: Instruction, wardrobe: Wardrobe | None, *, observed: bool) -> _Op:
        waits = []
        for wait in ins.host_waits:
            other = self.lanes[wait.lane]
            waits.append(
                _HostWait(other.signal, other.size, wait.position + 1 - wait.lag * other.size)
            )
        if ins.task in (ADMIT, RETIRE):
            step: Step = self._admit if ins.task == ADMIT else self._retire_step(ins)
            if observed:
                step = observe(self.flights, ins, step)
        else:
            step = build_step(self.flights, ins, self.engine.tasks[ins.task], observed=observed)
        if wardrobe is not None:
            step = dress(self.flights, wardrobe, step)
        return _Op(tuple(waits), ins.stage, step, ins.publish, ins)

    def _start(self) -> None:
        if self.engine.device.has_streams:
            # What the caller has queued so far (a model's initialisation) comes before the run.
            begin = self.engine.device.new_event()
            begin.record(self.flights.caller_stream)
            for stream in self.engine.streams.values():
                begin.wait(stream)
        _begun.add(self)
        try:
            for lane in self.lanes[1:]:
                target = functools.partial(self._work, lane)
                lane.thread = self.engine.host.start(f"swpipe-{lane.group}", target)
        except BaseException:
            self.end()
            raise

    # ----------------------------------------------------------------- driving

    @property
    def finished(self) -> bool:
        """Whether every iteration that the data has was handed out."""
        return self.retired >= self.flights.total

    @property
    def over(self) -> bool:
        """Whether it is finished, and has no failure left to tell."""
        return self.finished and self.failure is None

    @property
    def in_flight(self) -> int:
        """Iterations that were admitted and not handed out."""
        return self.admitted - self.retired

    def advance(self) -> IterContext | None:
        """One period of the default lane, on the calling thread; what it retired, if anything.

        A context that was retired is handed out even if the run failed meanwhile; the next call
        tells of the failure then.

        Raises:
            BaseException: The run's first failure, as itself. The run is over then.
        """
        try:
            try:
                self.driving = True
                self._turn(self.lanes[0], self.period)
                self.period += 1
            finally:
                self._leave()
        except BaseException as error:  # noqa: BLE001 - kept, and raised below
            self.fail(error, self.lanes[0])
        handed_out, self._handed_out = self._handed_out, None
        if handed_out is None:
            if self.failure is not None:
                raise self.failure
            if self.stopping:
                raise RuntimeError("the pipeline was closed by another thread during this call")
        return handed_out

    def _leave(self) -> None:
        # The watchdog interrupts a driving caller while it holds this lock: so the interrupt comes
        # before the end of this function, inside ``advance``, and not into its handling of a
        # failure.
        with self.lock:
            self.driving = False

    def stop_pulling(self) -> None:
        """Take what has been admitted for all that there is."""
        self.flights.total = min(self.flights.total, self.admitted)

    def _turn(self, lane: LaneRunner, period: int) -> None:
        lane.period = period
        observers = self.engine.observers()
        base = period * lane.size
        ops = lane.observed_ops if observers else lane.ops
        for position, (waits, stage, step, publish, ins) in enumerate(ops):
            lane.position = position
            if observers:
                for observer in observers:
                    observer.arrive(ins, self.flights.first_iteration + period - stage)
            for signal, size, offset in waits:
                signal.wait(period * size + offset)  # (1)
            if 0 <= period - stage < self.flights.total:
                if self.stopping:
                    raise Cancelled
                step(period - stage)
            if publish:
                lane.signal.advance(base + position + 1)

    def _work(self, lane: LaneRunner) -> None:
        last_stage = self.engine.program.depth - 1  # that of <retire>
        try:
            self.engine.device.use_on_this_thread()
            period = 0
            # To the last period of the run, even where this lane has no task left by then: another
            # lane's wait for an instruction of this one may stand for a wait for a third lane.
            while period - last_stage < self.flights.total:
                self._turn(lane, period)
                period += 1
        except BaseException as error:  # noqa: BLE001 - kept for the caller (2)
            self.fail(error, lane)
        else:
            # The periods to come are not: nobody waits for those.
            lane.signal.advance(FOREVER)
        finally:
            if lane.wardrobe is not None:
                lane.wardrobe.off()

    # ------------------------------------------------- swpipe's own two instructions

    def _admit(self, i: int) -> None:
        depth, device = self.engine.program.depth, self.engine.device
        before = self.engine.ends.get((self.flights.first_iteration + i) % depth)
        if before is not None:
            self._await_device(before)
        try:
            if self._any_draws:
                with self.flights.turns.turn():
                    batch = next(self.iterator)
            else:
                batch = next(self.iterator)
        except StopIteration:
            self.data_ended = True
            self.flights.total = i
            return
        source = None
        if device.has_streams and device.holds_work(batch):
            # Only then: to wait for the caller's stream is to wait for all the work queued on it.
            source = self._sources[i % depth] = self._sources[i % depth] or device.new_event()
            source.record(self.flights.caller_stream)
        ctx = IterContext(batch, self.flights.first_iteration + i)
        self.flights.slots[i % depth] = Flight(ctx, self.state, self.variables, source)
        self.admitted += 1

    def _await_device(self, event: Event) -> None:
        """Keep the host from running further ahead of the device than ``depth`` iterations."""
        pause_s = 20e-6
        while not event.query():
            if self.stopping:
                raise Cancelled
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 500e-6)

    def _retire_step(self, ins: Instruction) -> Step:
        device, depth = self.engine.device, self.engine.program.depth
        wait = (
            wait_for_events(self.flights, ins, self.flights.caller_stream)
            if device.has_streams
            else None
        )

        def retire(i: int) -> None:
            flight: Flight = self.flights.slots[i % depth]
            if wait is not None:
                wait(i)  # the caller's stream, for all sinks
                self._hold(flight)
                self._mark_end(i)
            self.flights.slots[i % depth] = None
            self.retired += 1
            self._handed_out = flight.ctx

        return retire

    def _hold(self, flight: Flight) -> None:
        self.engine.device.hold(
            (*vars(flight.ctx).values(), *flight.held),
            (self.flights.caller_stream, *self.engine.streams.values()),
        )

    def _mark_end(self, i: int) -> None:
        ends, slot = (
            self.engine.ends,
            (self.flights.first_iteration + i) % self.engine.program.depth,
        )
        end = ends[slot] = ends.get(slot) or self.engine.device.new_event()
        end.record(self.flights.caller_stream)

    # ------------------------------------------------------------------ ending

    def fail(self, error: BaseException, lane: LaneRunner) -> None:
        """Keep the first failure, with a note of where it happened, and wake everyone."""
        if isinstance(error, Cancelled):
            return
        where = (
            f"at task {lane.instruction.task!r}, iteration "
            f"{self.flights.first_iteration + lane.period - lane.instruction.stage}, "
            f"thread group {lane.group!r}"
        )
        if lane.instruction.task == ADMIT:
            iteration = self.flights.first_iteration + self.admitted
            where = f"pulling the batch of iteration {iteration}"
        if isinstance(error, StopIteration):
            # Out of progress() it would read as the end of the data (compare PEP 479).
            mended = RuntimeError("a task raised StopIteration, which only the user's iterator may")
            mended.__cause__ = error
            error = mended
        self.stop(error, f"swpipe: {where}")

    def stop(self, error: BaseException | None = None, note: str = "") -> None:
        """End the run; the first error given is the one that the caller gets."""
        with self.lock:
            if error is not None and self.failure is None and not self.stopping:
                self.failure = error
                if note:
                    error.add_note(note)
            self.stopping = True
        for lane in self.lanes:
            lane.signal.cancel()
        self.flights.turns.cancel()

    def end(self) -> None:
        """Stop the threads, wait for them, and let go of what is in flight."""
        if not self.finished:
            self.stop()
        self.lanes[0].signal.advance(FOREVER)
        self.join(None if self.finished else JOIN_GRACE_S)
        for lane in self.lanes[1:]:
            if lane.thread is not None and lane.thread.is_alive() and self.failure is not None:
                self.failure.add_note(
                    f"swpipe: thread group {lane.group!r} is still inside task "
                    f"{lane.instruction.task!r}; its thread ends when that returns"
                )
        self.flights.turns.end()
        if self.engine.device.has_streams and not self.finished:
            self._abandon()
        self.flights.clear()

    def join(self, grace_s: float | None) -> None:
        """Wait for the threads to end, for no longer than ``grace_s`` in all; None is for ever."""
        deadline = None if grace_s is None else time.monotonic() + grace_s
        for lane in self.lanes[1:]:
            if lane.thread is not None:
                lane.thread.join(None if deadline is None else max(0, deadline - time.monotonic()))

    def _abandon(self) -> None:
        """Hold what is in flight, and let what the caller does next come after its device work."""
        for flight in self.flights.slots:
            if flight is not None:
                self._hold(flight)
        try:
            for stream in self.engine.streams.values():
                end = self.engine.device.new_event()
                end.record(stream)
                end.wait(self.flights.caller_stream)
            for i in range(self.retired, self.admitted):
                self._mark_end(i)
        except Exception as error:
            if self.failure is None:
                raise
            self.failure.add_note(f"swpipe: the device's streams could not be joined: {error}")


@atexit.register
def _end_all() -> None:
    """End what nobody closed, and wait for tasks that a failed run left behind."""
    runs = list(_begun)
    for run in runs:
        run.stop()
    deadline = time.monotonic() + EXIT_GRACE_S
    for run in runs:
        run.join(max(0, deadline - time.monotonic()))
