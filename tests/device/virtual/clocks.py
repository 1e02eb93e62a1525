"""Happens-before on the host: vector clocks of threads, passed on by counters.

    thread A   1 . 2 . advance(1) ............ A knows {A: 2}
                          |
    thread B   1 . wait(1) 2 .................. B knows {A: 2, B: 2}
    thread C   1 . 2 . 3 ...................... C knows {C: 3}: nothing of A, however late it runs

An *actor* takes steps, one after another. A *clock* says how many steps of each actor happen before
a moment. It does not contain a step that only ran earlier by chance.

Guarantees
    - After a wait for a count, a thread knows what the writer knew when it first reached that
      count, and no more, however far the writer is by then.
    - A thread knows what its starter knew; whoever joins it knows what it knew at its end.

Assumptions
    - All order between threads comes from the host's counters, starts and joins; a lock orders
      nothing.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from swpipe._engine.waiting import Host, HostThread, ProgressCounter

Clock: TypeAlias = dict[Hashable, int]
"""The number of known steps, by actor."""


class Stamp(NamedTuple):
    """A step of an actor; steps are numbered from 1."""

    actor: Hashable
    step: int

    def before(self, clock: Clock) -> bool:
        """Return whether ``clock`` contains this step."""
        return clock.get(self.actor, 0) >= self.step


def merge(into: Clock, other: Clock) -> None:
    """Add the contents of ``other`` to ``into``."""
    for actor, step in other.items():
        if into.get(actor, 0) < step:
            into[actor] = step


class HostClocks:
    """The clocks of all threads; each thread is an actor."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._numbers = itertools.count()  # the system reuses idents of threads

    def _mine(self) -> tuple[Hashable, Clock]:
        local = self._local
        if not hasattr(local, "clock"):
            local.actor = f"thread {next(self._numbers)}"
            local.clock = {}
        return local.actor, local.clock

    def step(self) -> Stamp:
        """Add a step of the calling thread, and return it."""
        actor, clock = self._mine()
        clock[actor] = clock.get(actor, 0) + 1
        return Stamp(actor, clock[actor])

    def now(self) -> Clock:
        """Return a copy of the calling thread's clock, including its own steps."""
        return dict(self._mine()[1])

    def knows(self, stamp: Stamp) -> bool:
        """Return whether a step happens before this call."""
        return stamp.before(self._mine()[1])

    def learn(self, clock: Clock) -> None:
        """Add the contents of ``clock`` to the calling thread's clock."""
        merge(self._mine()[1], clock)


class ClockedCounter(ProgressCounter):
    """A counter that passes its writer's clock to those who wait for it."""

    __slots__ = ("_base", "_clocks", "_known", "_lock")

    def __init__(self, base: ProgressCounter, clocks: HostClocks) -> None:
        super().__init__()
        self._base = base
        self._clocks = clocks
        self._lock = threading.Lock()
        self._known: list[tuple[int, Clock]] = []  # count to the writer's clock, by count

    def advance(self, count: int) -> None:
        self._clocks.step()
        with self._lock:
            self._known.append((count, self._clocks.now()))
            self.count = count
        self._base.advance(count)

    def wait(self, count: int) -> None:
        self._base.wait(count)
        if count > 0:
            with self._lock:
                _, known = self._known[bisect_left(self._known, count, key=itemgetter(0))]
            self._clocks.learn(known)

    def cancel(self) -> None:
        self._base.cancel()


class ClockedThread:
    """A thread that inherits its starter's clock, and passes its own to those who join it."""

    def __init__(
        self, base: Host, clocks: HostClocks, name: str, target: Callable[[], None]
    ) -> None:
        clocks.step()
        self._clocks = clocks
        self._known_at_end: Clock = {}
        known_at_start = clocks.now()

        def body() -> None:
            clocks.learn(known_at_start)
            try:
                target()
            finally:
                self._known_at_end = clocks.now()

        self._thread = base.start(name, body)

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._clocks.learn(self._known_at_end)

    def is_alive(self) -> bool:
        return self._thread.is_alive()


class ClockedHost(Host):
    """A host that adds clocks to another host's threads and counters."""

    def __init__(self, clocks: HostClocks, base: Host | None = None) -> None:
        self._clocks = clocks
        self._base = base or Host()

    def counter(self) -> ProgressCounter:
        return ClockedCounter(self._base.counter(), self._clocks)

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        return ClockedThread(self._base, self._clocks, name, target)
