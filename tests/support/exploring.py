"""A host that explores interleavings: one thread runs at a time, and a seed says which.

    thread A  ====wait(3)                    ====advance(1)
    thread B            ====advance(3)===pause
    thread C                                                ====wait(9)   ...
                      ^               ^     ^              ^
                      at each of these the baton goes to a thread that can run, drawn from the seed

Every wait, advance, start and end of a thread and every ``pause`` may hand the baton on. A thread
that waits for a count that is not reached cannot run. When nobody can, that is a deadlock: one of
the waiters raises ``DeadlockError``, which says who waits for what.

Guarantees
    - The same seed gives the same interleaving, as long as tasks themselves are deterministic.
    - A deadlock is found at once, without a timeout.

Assumptions
    - Threads wait for each other through this host alone, and take no lock across a ``pause``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from swpipe._engine.waiting import Cancelled, Host, HostThread, ProgressCounter


class DeadlockError(Exception):
    """No thread can run."""


class _Fiber:
    """One thread: whether it can run, and how to wake it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wakes = threading.Semaphore(0)
        self.ended = False
        self.waits_for = ""
        self.can_run: Callable[[], bool] = _always
        self.deadlock: str | None = None


def _always() -> bool:
    return True


class ExploringHost(Host):
    """Threads and counters that run one at a time; made on the thread that drives the pipeline.

    Args:
        seed: The seed of the choices.

    Attributes:
        switches: The number of switches from one thread to another.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # Some schedules switch at every turn, some hardly ever: each finds what the other does not.
        self._restlessness = self._random.choice((0.1, 0.5, 1.0))
        self._local = threading.local()
        self._local.fiber = _Fiber("caller")
        self._fibers: list[_Fiber] = [self._local.fiber]
        self._counters = 0
        self.switches = 0

    def counter(self) -> ProgressCounter:
        self._counters += 1
        return _ExploredCounter(self, f"counter {self._counters}")

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        fiber = _Fiber(name)

        def body() -> None:
            self._local.fiber = fiber
            fiber.wakes.acquire()
            try:
                target()
            finally:
                fiber.ended = True
                self._fibers.remove(fiber)
                self._hand_on(fiber)

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._fibers.append(fiber)
        thread.start()
        self.pause()
        return _ExploredThread(self, thread, fiber)

    def pause(self) -> None:
        """Let another thread run, at random."""
        fiber: _Fiber = self._local.fiber
        if self._random.random() < self._restlessness:
            self._hand_on(fiber)

    def wait_until(self, can_run: Callable[[], bool], what: str) -> None:
        """Let other threads run until ``can_run`` returns True.

        Raises:
            DeadlockError: Nobody can.
        """
        fiber: _Fiber = self._local.fiber
        fiber.can_run, fiber.waits_for = can_run, what
        self._hand_on(fiber)
        fiber.can_run, fiber.waits_for = _always, ""
        told, fiber.deadlock = fiber.deadlock, None
        if told is not None:
            raise DeadlockError(told)

    def _ready(self) -> list[_Fiber]:
        """Return the threads that can run."""
        return [fiber for fiber in self._fibers if fiber.can_run()]

    def _hand_on(self, fiber: _Fiber) -> None:
        """Give the baton to a thread that can run, and sleep until it comes back."""
        ready = self._ready()
        chosen = self._random.choice(ready or self._fibers)
        if not ready:
            told = "; ".join(f"{other.name} waits for {other.waits_for}" for other in self._fibers)
            chosen.deadlock = f"nobody can run: {told}"
        if chosen is not fiber:
            self.switches += 1
            chosen.wakes.release()
            if not fiber.ended:
                fiber.wakes.acquire()


class _ExploredCounter(ProgressCounter):
    __slots__ = ("_host", "_name")

    def __init__(self, host: ExploringHost, name: str) -> None:
        super().__init__()
        self._host = host
        self._name = name

    def advance(self, count: int) -> None:
        self.count = count
        self._host.pause()

    def wait(self, count: int) -> None:
        self._host.pause()
        if self.count < count:
            self._host.wait_until(
                lambda: self.count >= count or self._cancelled, f"{self._name} to reach {count}"
            )
        if self.count < count:
            raise Cancelled

    def cancel(self) -> None:
        self._cancelled = True


class _ExploredThread:
    def __init__(self, host: ExploringHost, thread: threading.Thread, fiber: _Fiber) -> None:
        self._host = host
        self._thread = thread
        self._fiber = fiber

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends; the timeout is ignored, since a thread that can end does."""
        if not self._fiber.ended:
            self._host.wait_until(lambda: self._fiber.ended, f"{self._fiber.name} to end")
        self._thread.join()

    def is_alive(self) -> bool:
        return not self._fiber.ended
