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
      after another failure, and any exception of the caller's even after ``stop``.
    - Of several workers each goes through the periods of its own iterations, and whoever waits for
      their lane waits for the one whose turn it was. One that fails first lets the others pass the
      iterations before (3): the failure of the first of these is the one that is kept.
    - ``InFlightIterations.total``, the number of iterations, is set before the end of the data is
      published (``swpipe._engine.admission``); every task comes after the pull of its iteration,
      and so knows whether that iteration exists.
    - ``<retire>`` hands out a context and forgets it in the same step; a failure that comes right
      after it is raised by the next call.
    - ``stop`` sets flags and takes no lock: a signal handler may call it. ``end`` does the rest. It
      may be interrupted at any place, and called again, until ``ended``.
    - A call that an exception cut short anywhere (Ctrl-C) leaves ``interrupted`` set: the run is
      then good for nothing but ``end``.

Assumptions
    - One thread at a time drives a run; the pipeline sees to that.
    - A task's function returns in the end. Python cannot end a thread from outside: one that does
      not return is left running, named in the failure's note or a warning, and ends at its next
      instruction; when the interpreter exits, at the next line of Python that it runs.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from itertools import chain
from typing import Any, NamedTuple

from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled

from swpipe._engine.admission import Admission
from swpipe._engine.bind import Step, build_step, observe, wait_for_events, with_torch_state
from swpipe._engine.iterations import FOREVER, Engine, InFlight, InFlightIterations, reset_states
from swpipe._engine.process import add_run, remove_run
from swpipe._engine.program import BEGIN, OWN, SOURCES, Instruction, Lane
from swpipe._engine.release import finish, warn_of_missing, with_releases
from swpipe._engine.torch_state import Mode, ThreadTorchState, torch_state
from swpipe._engine.waiting import Cancelled, HostThread, ProgressCounter
from swpipe.core.context import TypedContext
from swpipe.core.plan import PULL
from swpipe.errors import StallError, add_note

JOIN_GRACE_S = 0.1
"""How long, in all, a run that fails or is closed waits for tasks that are still running."""

_FINISH_S = 10.0  # the same of a finished run, whose threads are past their last task
_LEAVE_S = 1.0  # for an interrupt that is on its way

CLOSED_IN_CALL = "the pipeline was closed during this call, by another thread, handler or task"


class WorkersProgress:
    """The progress of a lane whose workers take turns, to wait for as for that of one thread.

    Args:
        workers: Those of the lane.
        first: The number of the run's first iteration.
    """

    def __init__(self, workers: Sequence[LaneRunner], first: int) -> None:
        self._counters = [worker.progress for worker in workers]
        self._lane = workers[0].lane
        self._size = workers[0].size
        self._first = first

    def wait(self, count: int) -> None:
        """Sleep until the worker whose turn that is has reached ``count``."""
        turn = self._lane.turn(self._first + (count - 1) // self._size)
        self._counters[turn].wait(count)


class BoundWait(NamedTuple):
    """A wait for another lane's progress: ``period * size + base``."""

    progress: ProgressCounter | WorkersProgress
    size: int  # instructions in the lane that is waited for
    base: int  # its progress within a period once it has passed the instruction


class BoundInstruction(NamedTuple):
    """One instruction, bound: what ``_run_period`` executes."""

    waits: tuple[BoundWait, ...]
    stage: int
    step: Step
    publish: bool
    ins: Instruction


class LaneRunner:
    """A thread that runs a lane, one of several; ``period`` and ``position`` say where it is."""

    def __init__(self, lane: Lane, worker: int, progress: ProgressCounter) -> None:
        self.lane = lane
        self.worker = worker
        self.group = lane.group
        self.instructions = lane.instructions
        self.size = len(lane.instructions)
        self.progress = progress  # counts the instructions passed, in all periods
        self.period = 0
        self.position = 0
        self.ops: tuple[BoundInstruction, ...] = ()
        self.observed_ops: tuple[BoundInstruction, ...] = ()
        self.torch_state: ThreadTorchState | None = None  # of a worker
        self.thread: HostThread | None = None

    @property
    def instruction(self) -> Instruction:
        """Where the lane is."""
        return self.instructions[self.position]


class Run:
    """One run over one iterator: from the fill to the last retirement, or to the first failure."""

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
        self.mode = Mode.now(engine.mode())
        self._failure: dict[str, BaseException] = {}  # its setdefault lets the first one win
        self.stalled: StallError | None = None
        self.stopping = False
        self.draining = False
        self.flushing = False
        self.ending = False
        self.ended = False
        self.in_call = True  # inside ``start`` or ``advance``, or one of them was cut short
        # The thread that is inside ``advance``: it puts itself in, and takes itself out, unless the
        # watchdog has done so, to interrupt it.
        self.driver: dict[str, int] = {}
        self._handed_out: TypedContext | None = None
        # By the program's lanes: the workers of each.
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
            workers = self.groups[wait.lane]
            progress: ProgressCounter | WorkersProgress = workers[0].progress
            if len(workers) > 1:
                progress = WorkersProgress(workers, self.iterations.first)
            size = workers[0].size
            waits.append(BoundWait(progress, size, wait.position + 1 - wait.lag * size))
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
        """What the caller has submitted so far (a model's initialisation) comes before the run."""
        begin = self.engine.device.new_event()
        begin.record(self.iterations.caller_stream)
        for stream in self.engine.streams.values():
            begin.wait(stream)

    def start(self) -> None:
        """Start the threads; once, before the first ``advance``."""
        add_run(self)
        self._order_streams_after_the_callers()
        for lane in self.lanes[1:]:
            target = functools.partial(self._work, lane)
            name = f"swpipe-{lane.lane.threads[lane.worker]}"
            lane.thread = self.engine.host.start(name, target)
        self.in_call = False

    @property
    def failure(self) -> BaseException | None:
        """The first failure, until ``end``."""
        return self._failure.get("first")

    @property
    def interrupted(self) -> bool:
        """Whether the last call was cut short; meaningful between calls."""
        return self.in_call or self.ending or (self.stopping and self.failure is None)

    @property
    def finished(self) -> bool:
        """Whether every iteration that the data has was handed out."""
        return self.retired >= self.iterations.total

    @property
    def over(self) -> bool:
        """Whether it is finished, with no failure left to raise."""
        return self.retired >= self.iterations.total and not self._failure

    @property
    def in_flight(self) -> int:
        """Iterations that were admitted and not handed out, as far as the data is known to go."""
        return min(self.admission.admitted, self.iterations.total) - self.retired

    def read_callers_settings(self) -> None:
        """Read the calling thread's settings, for the iterations that are admitted from now on.

        Raises:
            RuntimeError: Iterations are in flight that were admitted in another mode or stream.
        """
        device = self.engine.device
        gradients, inference, dtype, other = self.mode  # making another one to compare takes longer
        if (
            is_grad_enabled() is not gradients
            or is_inference_mode_enabled() is not inference
            or get_default_dtype() is not dtype
            or self.engine.mode() != other
        ):
            self.mode = self.mode.switch(self.engine.mode(), self.in_flight)
        if self.iterations.caller_stream != device.current_stream():
            raise RuntimeError(
                "the current stream is not the one under which the pipeline was filled: make that "
                "stream current, or call drain() before switching"
            )
        if len(self.lanes) > 1:
            # Workers compare by identity.
            self.admission.state = torch_state(device.autocast_types, self.admission.state)
            self.admission.variables = copy_context()

    def advance(self) -> TypedContext | None:
        """Run one period of the default lane; returns the context that it retired, if any.

        Raises the run's first failure, as itself, which ends the run; but after a context that was
        retired in the same period, the next call does.
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
            # With a context to hand out, the next call raises it; but once closed, there is none.
            if self._goes_first(error) and (self._handed_out is None or self.failure is None):
                raise
        handed_out = self._handed_out
        self._handed_out = None
        if handed_out is not None:
            if self.driver:  # an exception came before _leave() had
                self._leave()
        else:
            if self.failure is not None:
                raise self.failure
            if self.stopping:
                raise RuntimeError(CLOSED_IN_CALL)
        self.in_call = False
        return handed_out

    def _goes_first(self, error: BaseException) -> bool:
        """Whether what the caller's thread raised is raised, whatever another thread did."""
        if isinstance(error, Cancelled) or self.stalled is not None:  # it is the interrupt
            return False
        return self.failure is None or not isinstance(error, Exception)

    def _leave(self) -> None:
        # If the watchdog has taken the entry, its interrupt is on the way. It is awaited here, so
        # that it arrives neither while ``advance`` handles a failure nor after it has returned.
        if self.driver.pop("thread", None) is None:
            time.sleep(_LEAVE_S)

    def settle(self) -> None:
        """Wait until the batches of all iterations that were admitted are pulled, or the data ends.

        If the run fails meanwhile, the next call says so.
        """
        pull = self.engine.program.instructions.get(PULL)
        if pull is None or self.finished:
            return
        admitted, (lane,) = self.admission.admitted, self.groups[pull.lane]
        self.in_call = True  # else nobody looks whether it stalls
        with suppress(Cancelled):
            lane.progress.wait((admitted - 1 + pull.stage) * lane.size + pull.position + 1)
        self.in_call = False

    def stop_admitting(self) -> None:
        """Stop admitting; finish what is in flight."""
        self.draining = True
        self.iterations.total = min(self.iterations.total, self.admission.admitted)

    def _run_period(self, lane: LaneRunner, period: int) -> None:
        lane.period = period
        iterations = self.iterations
        observers = self.engine.observers()
        passed = period * lane.size
        ops = lane.observed_ops if observers else lane.ops
        for position, (waits, stage, step, publish, ins) in enumerate(ops):
            lane.position = position
            i = period - stage
            for observer in observers:
                observer.arrive(ins, iterations.first + i)
            for progress, size, offset in waits:
                progress.wait(period * size + offset)  # (1)
            if 0 <= i < iterations.total:
                if self.stopping:
                    raise Cancelled
                step(i)
            if publish:
                lane.progress.advance(passed + position + 1)

    def _work(self, lane: LaneRunner) -> None:
        last_stage = self.engine.program.depth - 1  # that of <retire>
        try:
            self.engine.device.use_on_this_thread()
            first = self.iterations.first
            turn = lane.lane.turn
            step = lane.lane.workers
            period = next(p for p in range(step) if turn(first + p) == lane.worker)
            # To the last period of the run, even where this lane has no task left by then: another
            # lane's wait for an instruction of this one may stand for a wait for a third lane.
            while period - last_stage < self.iterations.total and not self.ended:
                self._run_period(lane, period)
                period += step
        except BaseException as error:  # noqa: BLE001 - kept for the caller (2)
            with suppress(Cancelled):
                self._let_earlier_pass(lane)
            self.fail(error, lane)
        else:
            lane.progress.advance(FOREVER)  # nobody waits for the periods after the last one
        finally:
            if lane.torch_state is not None:
                lane.torch_state.reset()

    def _let_earlier_pass(self, lane: LaneRunner) -> None:
        """Wait until all iterations before the worker's own are past its lane.

        Raises:
            Cancelled: One of them has failed, or something else.
        """
        for period in range(max(0, lane.period - lane.lane.workers + 1), lane.period):
            worker = self.worker(lane.instruction.lane, period)
            worker.progress.wait((period + 1) * lane.size)  # (3)

    def worker(self, lane: int, period: int) -> LaneRunner:
        """Whose turn a period is, in a lane of the program."""
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
        """Keep the first failure, wake everyone, and note on it where it happened."""
        if isinstance(error, Cancelled):
            return
        if isinstance(error, StopIteration):
            # Raised by progress() it would mean the end of the data (compare PEP 479).
            cause = error
            error = RuntimeError("a task raised StopIteration, which only the user's iterator may")
            error.__cause__ = cause
        self.stop(error)
        first = self.failure
        if first is None or first is error:
            add_note(error, f"swpipe: {self._place(lane)}")
        elif not isinstance(error, Exception):
            add_note(error, f"swpipe: after {type(first).__name__}: {first}")
            if lane is self.lanes[0] and self.stalled is None:
                self._failure["first"] = error  # the caller's, also where the next call raises it

    def _place(self, lane: LaneRunner) -> str:
        if lane.instruction.task in SOURCES:
            number = self.iterations.first + self.admission.pulled
            return f"pulling the batch of iteration {number}"
        number = lane.period - lane.instruction.stage
        which = f"iteration {self.iterations.first + number}" if number >= 0 else "no iteration yet"
        return f"at task {lane.instruction.task!r}, {which}, thread group {lane.group!r}"

    def stop(self, error: BaseException | None = None) -> None:
        """Tell all lanes to stop; the first error given is the one that the caller gets."""
        if error is not None and not self.stopping:
            self._failure.setdefault("first", error)
        self.stopping = True
        for lane in self.lanes:
            lane.progress.cancel()
        self.admission.cancel()
        self.iterations.generators.cancel()

    def end(self) -> None:
        """Stop the threads, wait for them, and drop what is in flight."""
        if self.ended:
            return
        if not self.finished:
            self.stop()
        self.ending = True
        self.lanes[0].progress.advance(FOREVER)
        self.join(JOIN_GRACE_S if self.stopping else _FINISH_S)
        self.iterations.generators.end()
        self.iterations.hold_waiting()
        if not self.finished:
            self._abandon()
            self._reset_states()
        self.iterations.clear()
        self.ended = True
        self._failure.clear()  # its traceback refers to this run
        if not self.left_inside():
            for lane in self.lanes:
                lane.ops = lane.observed_ops = ()  # they refer to this run, and it to the data
        remove_run(self)

    def left_inside(self) -> list[str]:
        """Where the threads that have not ended are."""
        return [
            f"thread group {lane.group!r} is still inside task {lane.instruction.task!r} of "
            f"iteration {self.iterations.first + lane.period - lane.instruction.stage}"
            for lane in self.lanes[1:]
            if lane.thread is not None and lane.thread.is_alive()
        ]

    def join(self, grace_s: float) -> None:
        """Wait for the threads to end, for no longer than ``grace_s`` in all."""
        deadline = time.monotonic() + grace_s
        for lane in self.lanes[1:]:
            if lane.thread is not None and lane.thread.ident != threading.get_ident():
                lane.thread.join(max(0, deadline - time.monotonic()))

    def forget_in_fork(self) -> None:
        """In a child process: the threads are the parent's, and so is the device's work."""
        self.stopping = self.ended = True
        for lane in self.lanes:
            lane.thread = None
        self._failure.clear()
        self.iterations.clear()

    def cut_short(self) -> None:
        """End what Python code still runs, at its next line."""
        for lane in self.lanes[1:]:
            if lane.thread is not None and lane.thread.is_alive() and lane.thread.ident:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(lane.thread.ident), ctypes.py_object(Cancelled)
                )

    def _reset_states(self) -> None:
        """Let the tasks forget what they keep for the iterations in flight."""
        try:
            reset_states(self.engine.tasks.values(), self.failure)
        except Exception:
            self.ended = True
            raise

    def _abandon(self) -> None:
        """Hold what is in flight, and order the caller's next work after its device work."""
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
        except Exception as error:
            if self.failure is None:
                self.ended = True
                raise
            add_note(self.failure, f"swpipe: the device's streams could not be joined: {error}")
