"""Who is told of tasks that run: a tool that sees NVTX, a torch profiler, a trace that records."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from torch.autograd import profiler

from swpipe._engine.program import Instruction


class Observer(Protocol):
    """Told of every task that runs, on the thread that runs it."""

    def arrive(self, ins: Instruction, iteration: int) -> None:
        """The lane has come to the instruction and may have to wait."""

    def start(self, ins: Instruction, iteration: int) -> None:
        """The task starts; its stream is current."""

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """The task has returned or raised; its stream is still current.

        ``exists`` is False where ``<admit>`` found that the data had ended: there is no such
        iteration.
        """


@contextmanager
def told(observers: Sequence[Observer], ins: Instruction, iteration: int) -> Iterator[None]:
    """Tell the observers of a task that runs within the block, outside any lane."""
    for observer in observers:
        observer.arrive(ins, iteration)
        observer.start(ins, iteration)
    try:
        yield
    finally:
        for observer in reversed(observers):
            observer.stop(ins, iteration)


class NvtxRanges:
    """A range per task, with the iteration as its payload.

    Args:
        domain: An ``nvtx`` domain.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain

    def arrive(self, ins: Instruction, iteration: int) -> None:
        return None

    def start(self, ins: Instruction, iteration: int) -> None:
        attributes = self._domain.get_event_attributes(message=ins.task, payload=iteration)
        self._domain.push_range(attributes)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._domain.pop_range()


class ProfilerRanges:
    """A ``record_function`` per task: about 10 us each, so only while a torch profiler is on.

    The profiler sees the thread that started it; the ranges of worker groups are in its trace only
    if it was told to profile all threads.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def arrive(self, ins: Instruction, iteration: int) -> None:
        return None

    def start(self, ins: Instruction, iteration: int) -> None:
        block = profiler.record_function(f"{ins.task} [{iteration}]")
        block.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(block)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._open.pop().__exit__(None, None, None)

    @property
    def _open(self) -> list[profiler.record_function]:
        """This thread's ranges, the innermost last: a task may drive a pipeline of its own."""
        if not hasattr(self._local, "open"):
            self._local.open = []
        return self._local.open  # type: ignore[no-any-return]


_profiler_ranges = ProfilerRanges()


def active_observers(device_type: str, recorder: Observer | None) -> tuple[Observer, ...]:
    """Whoever is to be told now; usually nobody, and then an empty tuple."""
    nvtx = nvtx_ranges() if device_type == "cuda" else None
    if nvtx is None and recorder is None and not profiler._is_profiler_enabled:
        return ()
    found: list[Observer] = []
    if nvtx is not None:
        found.append(nvtx)
    if profiler._is_profiler_enabled:
        found.append(_profiler_ranges)
    if recorder is not None:
        found.append(recorder)
    return tuple(found)


@cache
def nvtx_ranges() -> NvtxRanges | None:
    """Ranges in swpipe's own NVTX domain; None where no tool is attached that would see them."""
    import nvtx

    domain = nvtx.get_domain("swpipe")
    return NvtxRanges(domain) if isinstance(domain, nvtx.Domain) else None
