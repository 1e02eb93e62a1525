"""Counters that only grow, and threads that wait for them.

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

``wait`` has no time-out: a failure anywhere cancels every counter, and so does the run's watchdog.
All threads and counters come from a ``Host``, which a test can replace by a scheduler that explores
interleavings.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Protocol

WAKE_S = 0.2
"""The time in seconds after which a sleeping waiter wakes to look again.

A Ctrl-C that arrives just before the sleep begins does not end the sleep, and Python handles it
only
after the sleep.
"""


class Cancelled(BaseException):
    """The run has failed or was closed by another thread; the exception never leaves the engine."""


class ProgressCounter:
    """A counter that only grows, with one writer at a time, for which any thread can wait."""

    __slots__ = ("_cancelled", "_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        # Each waiter's locked gate, and the count that the waiter waits for.
        self._waiters: dict[threading.Lock, int] = {}
        self._cancelled = False

    def advance(self, count: int) -> None:
        """Set the counter, and wake every thread that waits for at most ``count``."""
        self.count = count
        if self._waiters:
            self._wake(count)

    def wait(self, count: int) -> None:
        """Sleep until the counter has reached ``count``.

        Raises:
            Cancelled: ``cancel`` was called before it did.
        """
        while self.count < count:
            # Python raises an exception of a signal handler between two sleeps, not within one.
            self.reaches(count, WAKE_S)

    def reaches(self, count: int, timeout_s: float) -> bool:
        """Sleep for at most ``timeout_s`` seconds, and return whether the count is reached.

        Raises:
            Cancelled: ``cancel`` was called, and the count is not reached.
        """
        if self.count >= count:
            return True
        gate = threading.Lock()
        gate.acquire()
        # Register first, then read ``count``; ``advance`` sets ``count`` first and then reads the
        # waiters. In every interleaving one of the two sees the other, so no wake-up is lost.
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
        """Wake all waiters; a waiter whose count is not reached raises ``Cancelled``."""
        self._cancelled = True
        self._wake(sys.maxsize)

    def _wake(self, count: int) -> None:
        for gate, target in self._waiters.copy().items():
            if target <= count:
                try:
                    gate.release()
                except RuntimeError:
                    # Another thread has just woken this waiter: its gate is released already.
                    continue
                # The waiter may take long to run again. Until then, further calls need not wake it.
                self._waiters.pop(gate, None)


class HostThread(Protocol):
    """The interface of a thread that the engine needs."""

    @property
    def ident(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class WorkerThread:
    """A daemon thread that starts when it is made.

    If a signal raises an exception in the middle of ``threading.Thread.start`` or ``join``, a
    running thread may count as ended, or the exception is replaced by "release unlocked lock". An
    exception raised while a ``threading.Thread`` is deallocated is lost. Therefore another thread,
    which gets no signals, starts the thread, and the thread itself has the last reference to its
    object.
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
        """Wait until the thread's work is done, for at most ``timeout`` seconds."""
        self._done.reaches(1, threading.TIMEOUT_MAX if timeout is None else timeout)

    def is_alive(self) -> bool:
        """Return whether the thread's work is not done."""
        return self._done.count == 0

    def _start(self) -> None:
        try:
            thread = self._thread
            self._thread = None
            if thread is not None:
                thread.start()
        except RuntimeError as error:
            # The system refuses another thread; the constructor raises this error.
            self._refused = error
        finally:
            self._started.advance(1)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._target()
        finally:
            # The target may refer to the object that owns this thread.
            del self._target
            self._done.advance(1)


class Host:
    """A factory of threads and counters of the operating system."""

    def counter(self) -> ProgressCounter:
        """Return a new counter at 0."""
        return ProgressCounter()

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        """Run ``target`` on a new daemon thread, and return the thread."""
        return WorkerThread(name, target)
