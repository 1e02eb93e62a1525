"""A limit on the time that a pass over several ranks' data may wait, on any thread.

A thread that pulls ahead waits for the other ranks, or for its own loader, while the caller's
thread is in the loop's body: possibly in a collective that another rank never reaches. An error
that the pulling thread raises would not be seen by anybody. So a third thread watches::

    pulling thread     pull 7: the loader hangs, or rank 1 does not answer
    caller's thread    body of 6, in a collective
    this thread        after ``limit_s``     1. writes the error to standard error
                       1 s later             2. raises it in the caller's thread
                       if that is stuck      3. interrupts it, aborts the process groups, and ends
                                                the process (``swpipe._engine.interruption``)

Guarantees
    - Each pass has its own thread, which ends with the pass, or when the pass is garbage-collected.
    - Time in which the process itself was stopped does not count.

Assumptions
    - The thread that made the pass also runs the loop's body.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from swpipe._engine.interruption import GRACE_S, LOOK_COUNTS_AT_MOST, end_thread, raise_in
from swpipe._engine.waiting import ProgressCounter, WorkerThread
from swpipe.errors import write_error

_RAISED_S = 1.0
"""The time in seconds in which the caller may get the error of the pulling thread by itself."""


class PullLimit:
    """A thread that watches one pass until ``end``.

    Attributes:
        began: An object for each pull of the rank's own data; None while no pull is under way.
        late: The error that a wait for other ranks has raised; None if none has.
        exceeded: The error of a pull that took too long, which this object raises in the caller's
            thread; None if no pull did.

    Args:
        watched: The pass; its thread keeps no reference to it.
        caller: The thread, by ``ident``, that runs the loop's body.
        limit_s: The largest time in seconds that one pull may take.
        describe: Returns the error of a pull that takes longer.
    """

    def __init__(
        self,
        watched: Any,
        caller: int,
        limit_s: float,
        describe: Callable[[Any], RuntimeError],
    ) -> None:
        self.began: object | None = None
        self.late: RuntimeError | None = None
        self.exceeded: RuntimeError | None = None
        self._limit_s = limit_s
        self._caller = caller
        self._ended = ended = ProgressCounter()
        # The thread must not keep the pass alive: it refers to it weakly, and its end ends the
        # thread.
        weakref.finalize(watched, ended.advance, 1).atexit = False
        self._watched = weakref.ref(watched)
        self._describe = describe
        self._thread = WorkerThread("swpipe-pull-limit", self._watch)

    def end(self) -> None:
        """End the thread."""
        self._ended.advance(1)
        if self._thread.ident != threading.get_ident():
            self._thread.join(GRACE_S)

    def raised(self, error: RuntimeError) -> None:
        """Record an error that a wait for other ranks raises in the pulling thread."""
        if threading.get_ident() != self._caller:
            self.late = error

    def _watch(self) -> None:
        interval_s = min(self._limit_s / 5, 1.0)
        last = time.monotonic()
        last_began = None
        pulling_s = 0.0
        while not self._ended.reaches(1, interval_s):
            # The pass is gone, and a signal has interrupted its finalizer.
            if self._watched() is None:
                return
            now = time.monotonic()
            # One look adds at most twice its interval: time in which the process was stopped does
            # not count.
            looked_s = min(now - last, LOOK_COUNTS_AT_MOST * interval_s)
            last = now
            pulling_s = pulling_s + looked_s if self.began == last_began is not None else 0.0
            last_began = self.began
            error = self.late
            if error is None and pulling_s >= self._limit_s:
                watched = self._watched()
                self.exceeded = None if watched is None else self._describe(watched)
                error = self.exceeded
                del watched
            if error is not None:
                self._fail(error)
                return

    def _fail(self, error: RuntimeError) -> None:
        place = self._place()
        write_error(f"swpipe: {type(error).__name__}: {error}")
        if error is self.late and self._has_moved(place, _RAISED_S):
            return  # it is in Python code, and gets the error with its next batch
        place = self._place()

        # ``PyThreadState_SetAsyncExc`` takes a class and calls it without arguments, so make one
        # that has this error's message. Its name is the error's, as a traceback shows it.
        class Late(type(error)):  # type: ignore[misc]  # raised in another thread, without arguments
            def __init__(self) -> None:
                super().__init__(*error.args)

        for name in ("__name__", "__qualname__", "__module__"):
            setattr(Late, name, getattr(type(error), name))
        raise_in(self._caller, Late)
        if not self._has_moved(place, GRACE_S):
            end_thread(self._caller, error, lambda: self._has_moved(place, GRACE_S))

    def _place(self) -> tuple[int, ...]:
        """Return the position of the caller's thread: its frames and their instructions."""
        frame = sys._current_frames().get(self._caller)
        place: list[int] = []
        while frame is not None:
            place += (id(frame), frame.f_lasti)
            frame = frame.f_back
        return tuple(place)

    def _has_moved(self, place: tuple[int, ...], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        # A thread in a collective stays at one instruction; any other instruction shows that it
        # runs.
        while self._place() == place:
            if time.monotonic() > deadline or self._ended.reaches(1, 0.05):
                return self._ended.count > 0
        return True
