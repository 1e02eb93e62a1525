"""The watchdog, which detects a stalled run and reports which lane waits for which.

One thread per run reads the positions of the lanes, a few times per ``timeout_s``. When no lane has
moved for that long during a call, the run fails with a ``StallError``. Its message names, for each
thread group, the task that it is in or the dependence that it waits for, with all stacks. Time in
which the process itself did not run (stopped by a signal, a paused container) does not count.

    caller waits for another lane       woken through the counter that it waits for
    caller is inside a task             1. the report is written to standard error
                                        2. the thread is interrupted: SIGINT on the main thread, an
                                           asynchronous exception on another
      still inside after ``GRACE_S``,   3. the process groups are aborted (NCCL's calls return)
      as one of several ranks           4. after ``GRACE_S`` more, the process exits with
                                           ``STALL_EXIT_CODE``, so that the other ranks end

A process that is not one of several ranks is not ended: no other process waits for it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from swpipe._distributed.rank_checks import rank_prefix
from swpipe._engine.interruption import GRACE_S, LOOK_COUNTS_AT_MOST, end_thread
from swpipe._engine.waiting import ProgressCounter, WorkerThread
from swpipe.errors import StallError, write_error
from swpipe.program import SOURCES, HostWait

if TYPE_CHECKING:
    from swpipe._engine.run import LaneRunner, Run


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return ``timeout_s``; raise ValueError if it is not None and not a number above 0."""
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is None or (number and timeout_s > 0):
        return timeout_s
    raise ValueError(
        f"stall_timeout_s is {timeout_s!r}: give seconds, above 0, or None to wait forever"
    )


class Watchdog:
    """A thread that watches one run until ``stop``.

    Args:
        run: The run to watch.
        timeout_s: The number of seconds without movement after which the run fails; None for no
            limit.
        caller: Returns the ``ident`` of the thread whose call is under way; None if there is none.
        owner: A weak reference to the run's driver, whose finalizer ends the run. An exception that
            a signal handler raises in a finalizer is lost and interrupts the finalizer. Therefore
            the watchdog also ends the run, and its own thread, when the driver is gone.
    """

    def __init__(
        self,
        run: Run,
        timeout_s: float | None,
        caller: Callable[[], int | None],
        owner: Callable[[], object | None],
    ) -> None:
        self._run = run
        self._owner = owner
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._caller = caller
        self._stopped = ProgressCounter()
        self._thread: WorkerThread | None = None

    def start(self) -> None:
        """Start to watch, if there is a time limit."""
        if self._timeout_s < math.inf:
            self._thread = WorkerThread("swpipe-watchdog", self._watch)

    def stop(self) -> None:
        """End the watchdog's thread."""
        self._stopped.advance(1)
        if self._thread is not None and self._thread.ident != threading.get_ident():
            self._thread.join(GRACE_S)

    def _watch(self) -> None:
        last_places: list[tuple[int, int]] = []
        interval_s = min(self._timeout_s / 5, 1.0)
        idle_s = 0.0
        last = time.monotonic()
        # Idle time is summed over looks instead of measured from the last movement: one look adds
        # at most twice its interval, so that a process that was stopped and continued is not taken
        # for stalled.
        gone = 0
        while not self._stopped.reaches(1, interval_s):
            now = time.monotonic()
            looked_s = min(now - last, LOOK_COUNTS_AT_MOST * interval_s)
            last = now
            gone = gone + 1 if self._owner() is None else 0
            if gone > 1:  # the finalizer has had its time
                self._run.end()
                return
            places = [(lane.period, lane.position) for lane in self._run.lanes]
            # Between two calls nothing has to move: the user's code is running.
            if places != last_places or not self._run.in_call:
                last_places = places
                idle_s = 0.0
                continue
            idle_s += looked_s
            if idle_s >= self._timeout_s and (caller := self._caller()) is not None:
                self._fail(idle_s, caller)
                return

    def _fail(self, idle_s: float, caller: int) -> None:
        run = self._run
        error = StallError(
            f"{rank_prefix()}nothing has moved for {idle_s:.1f} s\n{self._report(caller)}"
        )
        # Read both before ``stop``, which wakes the lanes and so changes their positions.
        inside = unmet(run, run.lanes[0]) is None
        place = (run.lanes[0].period, run.lanes[0].position)
        run.stalled = error
        run.stop(error)
        if not inside:
            return
        write_error(f"swpipe: StallError: {error}")
        if run.driver.pop("thread", None) is None:
            # The call is leaving by itself. Whoever removes the entry decides: an interrupt now
            # would hit the user's code.
            return
        # A new error for the report: notes on ``error`` are added when the caller's thread raises
        # it.
        end_thread(caller, StallError(str(error)), lambda: self._has_left(place))

    def _has_left(self, place: tuple[int, int]) -> bool:
        """Return whether the caller leaves the task within ``GRACE_S``."""
        for _ in range(20):
            lane = self._run.lanes[0]
            if self._stopped.reaches(1, GRACE_S / 20) or (lane.period, lane.position) != place:
                return True
            if self._run.ending or self._caller() is None:
                return True
        return False

    def _report(self, caller: int) -> str:
        frames = sys._current_frames()
        lines = []
        for lane in self._run.lanes:
            lines.append(f"  thread group {lane.group!r}: {_doing(self._run, lane)}")
            ident = caller if lane.thread is None else lane.thread.ident
            frame = frames.get(ident) if ident is not None else None
            if frame is not None:
                stack = "".join(traceback.format_stack(frame))
                lines.append("    " + stack.replace("\n", "\n    ").rstrip())
        return "\n".join(lines)


def unmet(run: Run, lane: LaneRunner) -> HostWait | None:
    """Return the wait that the lane is in; None if the lane is inside a task."""
    for wait in lane.instruction.host_waits:
        other = run.worker(wait.lane, lane.period - wait.lag)
        if other.progress.count < (lane.period - wait.lag) * other.size + wait.position + 1:
            return wait
    return None


def _doing(run: Run, lane: LaneRunner) -> str:
    ins = lane.instruction
    wait = unmet(run, lane)
    place = _place(run, ins.task, lane.period - ins.stage)
    if wait is None:
        if ins.task in SOURCES:
            number = run.iterations.first + lane.period
            return f"pulling the batch of iteration {number}, or waiting for the device"
        # ``<retire>`` has no task.
        task = run.engine.tasks.get(ins.task)
        seeded = task is not None and task.random
        access = ", or waiting for access to the random number generators" if seeded else ""
        return f"inside {place}{access}"
    other = run.worker(wait.lane, lane.period - wait.lag)
    producer = other.instructions[wait.position]
    of = _place(run, wait.producer, lane.period - wait.lag - producer.stage)
    return f"{place} waits for {of} (thread group {other.group!r})"


def _place(run: Run, task: str, number: int) -> str:
    """Return a text that names a task and its iteration.

    ``number`` counts from 0 within the run.
    """
    # While the pipeline fills, a lane is at tasks whose iteration does not exist.
    if number < 0:
        return f"task {task!r}, before its first iteration,"
    return f"task {task!r} of iteration {run.iterations.first + number}"
