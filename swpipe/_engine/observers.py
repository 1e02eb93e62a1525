"""Who is told of each task that runs: user observers, NVTX tools, the torch profiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch.autograd import profiler

from swpipe._engine.program import Instruction
from swpipe.core.messages import shown
from swpipe.device import Device


@runtime_checkable
class Observer(Protocol):
    """Called around every task, on the thread that runs it. Subclass it, and override what you use.

    The instruction says which task it is: ``ins.task``; or "<admit>", "<pull>" and "<retire>", in
    which the pipeline waits until there is room for an iteration, pulls a batch, and hands out a
    context.
    """

    def arrive(self, ins: Instruction, iteration: int) -> None:
        """The thread has come to the task, and may have to wait for others."""
        return

    def start(self, ins: Instruction, iteration: int) -> None:
        """The task starts; its stream is current."""
        return

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """The task has returned or raised; its stream is still current.

        ``exists`` is False where "<pull>" found that the data had ended: there is no such
        iteration.
        """
        return


class NvtxRanges(Observer):
    """A range per task in an ``nvtx`` domain, with the iteration as its payload."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain

    def start(self, ins: Instruction, iteration: int) -> None:
        attributes = self._domain.get_event_attributes(message=ins.task, payload=iteration)
        self._domain.push_range(attributes)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._domain.pop_range()


class ProfilerRanges(Observer):
    """A ``record_function`` per task: about 10 us each, so only while a torch profiler is on.

    Its name is the task's, so that ``key_averages()`` has a row per task.

    A profiler sees the thread that started it, and the threads of other groups only where it
    profiles all threads.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        block = profiler.record_function(ins.task)
        block.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(block)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._open.pop().__exit__(None, None, None)

    @property
    def _open(self) -> list[profiler.record_function]:
        """This thread's ranges, the innermost last: a task may run a pipeline of its own."""
        if not hasattr(self._local, "open"):
            self._local.open = []
        return self._local.open  # type: ignore[no-any-return]


_profiler_ranges = ProfilerRanges()


@cache
def nvtx_ranges() -> NvtxRanges | None:
    """Ranges in the NVTX domain "swpipe"; None where no tool is attached that shows them.

    The package has no wheels for some systems; without it there are no ranges.
    """
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain("swpipe")
    return NvtxRanges(domain) if isinstance(domain, nvtx.Domain) else None


class Observers:
    """The observers of one pipeline; call it for those that are active now.

    Attributes:
        everywhere: Those of all pipelines of the process, for tools.
    """

    everywhere: tuple[Observer, ...] = ()

    def __init__(self, device: Device) -> None:
        self._has_nvtx = device.has_nvtx
        self._added: tuple[Observer, ...] = ()
        self._lock = threading.Lock()

    def __call__(self) -> tuple[Observer, ...]:
        """Usually an empty tuple. Those added come last, so that they do not time the others."""
        nvtx = nvtx_ranges() if self._has_nvtx else None
        if nvtx is None and not profiler._is_profiler_enabled:
            return self._added + self.everywhere
        tools = (nvtx, _profiler_ranges if profiler._is_profiler_enabled else None)
        return (*(tool for tool in tools if tool is not None), *self._added, *self.everywhere)

    def adding(self, observer: Observer) -> AbstractContextManager[None]:
        """Add an observer within the block.

        Raises:
            TypeError: It is no ``Observer``.
        """
        if isinstance(observer, type) or not isinstance(observer, Observer):
            raise TypeError(f"{shown(observer)} is no Observer: give an object of a subclass")
        return self._adding(observer)

    @contextmanager
    def _adding(self, observer: Observer) -> Iterator[None]:
        with self._lock:
            self._added += (observer,)
        try:
            yield
        finally:
            with self._lock:
                index = next(i for i, one in enumerate(self._added) if one is observer)
                self._added = self._added[:index] + self._added[index + 1 :]


@contextmanager
def observing(observers: Sequence[Observer], ins: Instruction, iteration: int) -> Iterator[None]:
    """Tell the observers of a task that runs within the block, outside any lane."""
    for observer in observers:
        observer.arrive(ins, iteration)
        observer.start(ins, iteration)
    try:
        yield
    finally:
        for observer in reversed(observers):
            observer.stop(ins, iteration)
