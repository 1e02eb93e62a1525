"""Loops of known cost, on a virtual clock, and the reports on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from swpipe import DeclaredIO, IterContext, PipelineTask
from tests.support.virtual_clock import TimedHost


class Clock(Protocol):
    """Takes time, real or virtual; in seconds."""

    def compute(self, seconds: float) -> None: ...

    def sleep(self, seconds: float) -> None: ...


def takes(host: Clock, *, computes_ms: float = 0, waits_ms: float = 0) -> Callable[..., None]:
    """A task's function: on the CPU for so long, then off it.

    It keeps no reference to the clock, whose generator would be taken for a state of the task.
    """
    clock = ref(host)

    def fn(ctx: IterContext) -> None:
        now = clock()
        assert now is not None
        now.compute(computes_ms / 1e3)
        now.sleep(waits_ms / 1e3)

    return fn


class Batches:
    """A loader whose every call takes a while; not known to be apart from the loop."""

    def __init__(self, host: TimedHost, ms: float) -> None:
        self.host, self.ms = host, ms

    def __iter__(self) -> Any:
        for number in range(1000):
            self.host.compute(self.ms / 1e3)
            yield number


def image_loop(
    host: TimedHost, *, decode: float, train: float, log: float = 1
) -> list[PipelineTask]:
    """Decode, train, log; in milliseconds of the CPU."""
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
