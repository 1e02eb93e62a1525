"""Loops of known cost, on a virtual clock, and the reports on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ref

from swpipe import DeclaredIO, IterContext, PipelineTask
from tests.support.virtual_clock import TimedHost


class Clock(Protocol):
    """The interface of a clock, real or virtual; times are in seconds."""

    def compute(self, seconds: float) -> None: ...

    def sleep(self, seconds: float) -> None: ...


def takes(host: Clock, *, computes_ms: float = 0, waits_ms: float = 0) -> Callable[..., None]:
    """Return a task's function that computes, and then waits.

    It keeps no reference to the clock, whose generator would be taken for a state of the task.
    """
    clock = ref(host)

    return lambda ctx: take(clock(), computes_ms=computes_ms, waits_ms=waits_ms)


def take(clock: Clock | None, *, computes_ms: float = 0, waits_ms: float = 0) -> None:
    """Compute for some time, and then wait."""
    assert clock is not None
    clock.compute(computes_ms / 1e3)
    clock.sleep(waits_ms / 1e3)


class VirtualLock:
    """A lock of the program, for threads on a virtual clock."""

    def __init__(self, host: TimedHost) -> None:
        self._host = ref(host)
        self._held = False

    def __enter__(self) -> None:
        host = self._host()
        assert host is not None
        host.wait_until(lambda: not self._held, "the lock")
        self._held = True

    def __exit__(self, *failure: object) -> None:
        self._held = False


def lock_of(clock: Clock) -> Any:
    """Return a lock for threads on this clock."""
    return VirtualLock(clock) if isinstance(clock, TimedHost) else threading.Lock()


class Calls:
    """A loader whose call for a batch waits for the time that ``ms`` gives for its number."""

    def __init__(self, clock: Clock, ms: Callable[[int], float], length: int) -> None:
        self.clock, self.ms, self.length = clock, ms, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.clock.sleep(self.ms(number) / 1e3)
            yield number


class Batches:
    """A loader whose calls take time, and that is not known to be apart."""

    def __init__(self, host: TimedHost, ms: float) -> None:
        self.host, self.ms = host, ms

    def __iter__(self) -> Any:
        for number in range(1000):
            self.host.compute(self.ms / 1e3)
            yield number


def image_loop(
    host: TimedHost, *, decode: float, train: float, log: float = 1
) -> list[PipelineTask]:
    """Return the tasks decode, train and log; times are in milliseconds of the CPU."""
    model = [DeclaredIO(state="model", mode="rw")]
    return [
        PipelineTask("decode", _sets("x", takes(host, computes_ms=decode)), pure=True),
        PipelineTask("train", _reads("x", takes(host, computes_ms=train)), io=model),
        PipelineTask("log", takes(host, waits_ms=log), io=[DeclaredIO(state="log", mode="rw")]),
    ]


def _sets(name: str, fn: Callable[..., None]) -> Callable[..., None]:
    def run(ctx: IterContext) -> None:
        fn(ctx)
        setattr(ctx, name, ctx.batch)

    return run


def _reads(name: str, fn: Callable[..., None]) -> Callable[..., None]:
    def run(ctx: IterContext) -> None:
        getattr(ctx, name)
        fn(ctx)

    return run
