"""Waiting: counters that only grow, and the threads that wait for them.

    writer (one lane)                 waiters (any number)
    advance(5) --- count: 5 --------> wait(4) returns at once
                                      wait(7) sleeps until advance(7) or cancel()

Guarantees
    - ``wait(n)`` returns once ``advance(m)``, m >= n, was called; all that the writer did before
      that call is visible to the waiter.
    - After ``cancel()`` every present and later ``wait`` whose count is not reached raises
      ``Cancelled``.
    - No wake-up is lost: count, cancellation and the list of waiters change only under the lock,
      and a waiter joins the list in the same critical section in which it found the count too low.

Assumptions
    - One thread at a time advances a counter, to ever greater counts.
    - Nothing is assumed of the interpreter lock: ``count`` is read outside the lock for reports
      only.

A waiter has no time-out of its own: a failure anywhere cancels every counter, and so does the run's
watchdog. All threads and counters come from a ``Host``, which a test can replace by a scheduler
that explores interleavings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

WAKE_S = 0.2
"""A waiter wakes this often to handle signals: a Ctrl-C that arrives just before the sleep begins
does not end it, and would otherwise be seen only after it."""


class Cancelled(BaseException):
    """The run has failed, or was closed by another thread. Never leaves the engine."""


class ProgressCounter:
    """A counter that only grows, by one writer at a time, and that any thread can wait for."""

    __slots__ = ("_cancelled", "_lock", "_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._waiters: list[tuple[int, threading.Lock]] = []
        self._cancelled = False

    def advance(self, count: int) -> None:
        """Set the counter and wake whoever waits for no more than that."""
        with self._lock:
            self.count = count
            if self._waiters:
                self._wake(lambda target: target <= count)

    def wait(self, count: int) -> None:
        """Sleep until the counter has reached ``count``.

        Raises:
            Cancelled: ``cancel`` was called before it did.
        """
        with self._lock:
            if self.count >= count:
                return
            if self._cancelled:
                raise Cancelled
            gate = threading.Lock()
            gate.acquire()
            self._waiters.append((count, gate))
        while not gate.acquire(timeout=WAKE_S):
            pass  # pending signal handlers have run now
        with self._lock:
            if self.count < count:
                raise Cancelled

    def cancel(self) -> None:
        """Wake everyone; whoever waits for a count not reached gets ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            self._wake(lambda target: True)

    def _wake(self, due: Callable[[int], bool]) -> None:
        left = []
        for target, gate in self._waiters:
            if due(target):
                gate.release()
            else:
                left.append((target, gate))
        self._waiters = left


class HostThread(Protocol):
    """What the engine needs of a thread."""

    @property
    def ident(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Host:
    """Threads and counters of the operating system."""

    def counter(self) -> ProgressCounter:
        """A new counter at 0."""
        return ProgressCounter()

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        """Run ``target`` on a new thread, which does not keep the interpreter alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
