"""Waiting: counters that only grow, and the threads that wait for them.

    writer (one lane)                 waiters (any number)
    advance(5) --- count: 5 --------> wait(4) returns at once
                                      wait(7) sleeps until advance(7) or cancel()

Guarantees
    - ``wait(n)`` returns once ``advance(m)``, m >= n, was called; all that the writer did before
      that call is visible to the waiter.
    - After ``cancel()`` every present and later ``wait`` whose count is not reached raises
      ``Cancelled``.
    - No call takes a lock. A signal handler may call ``cancel`` whatever it interrupted, and an
      exception that arrives in the middle of a call (Ctrl-C) leaves nothing that others wait for.

Assumptions
    - One thread at a time advances a counter, to ever greater counts.
    - Each operation of a dictionary is atomic, with and without the interpreter lock.
    - A waiter registers before it reads ``count``, and a writer reads the waiters after it has set
      ``count``, so that one of the two sees the other. If the hardware reorders these, the waiter
      wakes by itself: it looks every ``WAKE_S``.

A waiter has no time-out of its own: a failure anywhere cancels every counter, and so does the run's
watchdog. All threads and counters come from a ``Host``, which a test can replace by a scheduler
that explores interleavings.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Protocol

WAKE_S = 0.2
"""A waiter wakes this often: a Ctrl-C that arrives just before the sleep begins does not end it,
and would otherwise be seen only after it."""


class Cancelled(BaseException):
    """The run has failed, or was closed by another thread. Never leaves the engine."""


class ProgressCounter:
    """A counter that only grows, by one writer at a time, and that any thread can wait for."""

    __slots__ = ("_cancelled", "_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiters: dict[threading.Lock, int] = {}  # a held lock per waiter, to its count
        self._cancelled = False

    def advance(self, count: int) -> None:
        """Set the counter and wake whoever waits for no more than that."""
        self.count = count
        if self._waiters:
            self._wake(count)

    def wait(self, count: int) -> None:
        """Sleep until the counter has reached ``count``.

        Raises:
            Cancelled: ``cancel`` was called before it did.
        """
        while self.count < count:
            # An exception that a signal raised just before the sleep is seen between two.
            self.reaches(count, WAKE_S)

    def reaches(self, count: int, timeout_s: float) -> bool:
        """The same, for one sleep of ``timeout_s`` at most; whether it has reached ``count``."""
        if self.count >= count:
            return True
        gate = threading.Lock()
        gate.acquire()
        self._waiters[gate] = count
        try:
            if self.count < count and not self._cancelled:
                gate.acquire(timeout=timeout_s)
        finally:
            self._waiters.pop(gate, None)
        if self.count < count and self._cancelled:
            raise Cancelled
        return self.count >= count

    def cancel(self) -> None:
        """Wake everyone; whoever waits for a count not reached gets ``Cancelled``."""
        self._cancelled = True
        self._wake(sys.maxsize)

    def _wake(self, count: int) -> None:
        for gate, target in self._waiters.copy().items():
            if target <= count:
                try:
                    gate.release()
                except RuntimeError:  # another thread has just woken it
                    continue
                # Until it runs again, which may take long, further calls need not wake it.
                self._waiters.pop(gate, None)


class HostThread(Protocol):
    """What the engine needs of a thread."""

    @property
    def ident(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class WorkerThread:
    """A daemon thread that starts when it is made.

    An exception that a signal raises in the middle of ``threading.Thread.start`` or ``join`` leaves
    a thread that runs and counts as ended, or is replaced by "release unlocked lock"; one that it
    raises while a ``threading.Thread`` is deallocated is lost. So another thread, which gets no
    signals, does the start, and the thread itself has the last reference to its object.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._target = target
        self.ident: int | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name=name, daemon=True
        )
        self._refused: RuntimeError | None = None
        self._started = ProgressCounter()
        self._done = ProgressCounter()
        _thread.start_new_thread(self._start, ())
        self._started.wait(1)
        if self._refused is not None:
            raise self._refused

    def join(self, timeout: float | None = None) -> None:
        """Wait until its work is done, for no longer than ``timeout`` seconds."""
        self._done.reaches(1, threading.TIMEOUT_MAX if timeout is None else timeout)

    def is_alive(self) -> bool:
        """Whether its work is not done."""
        return self._done.count == 0

    def _start(self) -> None:
        try:
            thread = self._thread
            self._thread = None
            if thread is not None:
                thread.start()
        except RuntimeError as error:  # the system refuses one more
            self._refused = error
        finally:
            self._started.advance(1)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._target()
        finally:
            del self._target  # it may refer to whoever has this thread
            self._done.advance(1)


class Host:
    """Threads and counters of the operating system."""

    def counter(self) -> ProgressCounter:
        """A new counter at 0."""
        return ProgressCounter()

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        """Run ``target`` on a new thread, which does not keep the interpreter alive."""
        return WorkerThread(name, target)
