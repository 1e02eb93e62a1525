"""Detect that nothing moves, and report who waits for whom.

One thread per run checks where the lanes are, a few times per ``timeout_s``. When no lane has moved
for that long while the caller is inside ``progress()``, the run fails with a ``StallError`` whose
message names, for each thread group, the task that it is in or the dependence that it waits for,
with all stacks.

A caller that waits for another lane is woken through the counter that it waits for. One that is
stuck inside a task of its own is interrupted: on the main thread by SIGINT, which ends blocking
calls too; on another thread by an asynchronous exception, which is raised as soon as Python code
runs there.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from swpipe._engine.program import ADMIT, HostWait
from swpipe.core.errors import StallError

if TYPE_CHECKING:
    from swpipe._engine.run import LaneRunner, Run


def checked_timeout(timeout_s: float | None) -> float | None:
    """``timeout_s``; ValueError if it is neither None nor a number of seconds above 0."""
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is None or (number and timeout_s > 0):
        return timeout_s
    raise ValueError(
        f"stall_timeout_s is {timeout_s!r}: give seconds, above 0, or None to wait for ever"
    )


class Watchdog:
    """Watches one run from a thread of its own until ``stop``."""

    def __init__(
        self, run: Run, timeout_s: float, on_idle: Callable[[], None] | None = None
    ) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._on_idle = on_idle  # called at each check that finds that nothing has moved
        self._stop = threading.Event()
        self._caller: int | None = None
        self._thread = threading.Thread(target=self._watch, name="swpipe-watchdog", daemon=True)
        self._thread.start()

    def drive_from_here(self) -> None:
        """The calling thread is the one that drives the run now."""
        self._caller = threading.get_ident()

    def stop(self) -> None:
        """End the watchdog's thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        seen: list[tuple[int, int]] = []
        since = time.monotonic()
        while not self._stop.wait(min(self._timeout_s / 5, 1.0)):
            now = time.monotonic()
            places = [(lane.period, lane.position) for lane in self._run.lanes]
            if places != seen or not self._run.driving:
                seen, since = places, now
            elif now - since >= self._timeout_s:
                self._fail(now - since)
                return
            elif self._on_idle is not None:
                self._on_idle()

    def _fail(self, idle_s: float) -> None:
        run = self._run
        caller = run.lanes[0]
        error = StallError(f"nothing has moved for {idle_s:.1f} s\n{self._report()}")
        stuck_inside = unmet(run, caller) is None
        run.stop(error)
        with run.lock:
            if run.driving and run.failure is error and stuck_inside and self._caller is not None:
                _interrupt(self._caller)

    def _report(self) -> str:
        frames = sys._current_frames()
        lines = []
        for lane in self._run.lanes:
            lines.append(f"  thread group {lane.group!r}: {_doing(self._run, lane)}")
            ident = self._caller if lane.thread is None else lane.thread.ident
            frame = frames.get(ident) if ident is not None else None
            if frame is not None:
                stack = "".join(traceback.format_stack(frame))
                lines.append("    " + stack.replace("\n", "\n    ").rstrip())
        return "\n".join(lines)


def unmet(run: Run, lane: LaneRunner) -> HostWait | None:
    """The wait that the lane is in; None when it is inside a task."""
    for wait in lane.instruction.host_waits:
        other = run.lanes[wait.lane]
        if other.progress.count < (lane.period - wait.lag) * other.size + wait.position + 1:
            return wait
    return None


def _doing(run: Run, lane: LaneRunner) -> str:
    ins = lane.instruction
    iteration = run.iterations.first + lane.period - ins.stage
    wait = unmet(run, lane)
    if wait is None:
        if ins.task == ADMIT:
            return f"pulling the batch of iteration {iteration}, or waiting for the device"
        task = run.engine.tasks.get(ins.task)  # None for <retire>
        seeded = task is not None and task.random
        access = ", or waiting for access to the random number generators" if seeded else ""
        return f"inside task {ins.task!r} of iteration {iteration}{access}"
    other = run.lanes[wait.lane]
    producer = other.instructions[wait.position]
    of = run.iterations.first + lane.period - wait.lag - producer.stage
    return (
        f"task {ins.task!r} of iteration {iteration} waits for task {wait.producer!r} "
        f"of iteration {of} (thread group {other.group!r})"
    )


def _interrupt(ident: int) -> None:
    main = threading.main_thread().ident
    if ident == main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's handlers end blocking calls; libraries that hook SIGINT (polars does, at its
        # first query) let such calls go on instead.
        signal.siginterrupt(signal.SIGINT, True)
        signal.pthread_kill(ident, signal.SIGINT)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(ident), ctypes.py_object(StallError)
        )
