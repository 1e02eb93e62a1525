"""Observers of each task that runs: the user's, NVTX tools, and the torch profiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol, runtime_checkable

from torch.autograd import profiler

from swpipe.core.messages import shown
from swpipe.device import Device
from swpipe.program import Instruction


@runtime_checkable
class Observer(Protocol):
    """A base class for objects that are called around every task, on the task's thread.

    Override the methods that you use. ``ins.task`` is the name of the task, or "<admit>", "<pull>"
    or "<retire>": in these the pipeline waits until there is room for an iteration, pulls a batch,
    and hands out a context. ``iteration`` counts from 0 over all runs of the pipeline.
    """

    def arrive(self, ins: Instruction, iteration: int) -> None:
        """Handle the arrival of the thread at the task, before it waits for other threads."""
        return

    def start(self, ins: Instruction, iteration: int) -> None:
        """Handle the start of the task. Its stream is current."""
        return

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """Handle the end of the task, which has returned or raised. Its stream is still current.

        ``exists`` is False if "<pull>" found the end of the data: the iteration does not exist.
        """
        return


class NvtxRanges(Observer):
    """An observer that opens a range per task in an NVTX domain; the iteration is its payload."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain

    def start(self, ins: Instruction, iteration: int) -> None:
        attributes = self._domain.get_event_attributes(message=ins.task, payload=iteration)
        self._domain.push_range(attributes)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._domain.pop_range()


class ProfilerRanges(Observer):
    """An observer that opens a ``record_function`` range per task, while a torch profiler is on.

    A range costs about 10 us. It has the name of the task, so that ``key_averages()`` has a row per
    task.

    A profiler sees the thread that started it. It sees the threads of other groups only if it
    profiles all threads.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        block = profiler.record_function(ins.task)
        # ``start`` and ``stop`` are two calls, so the block cannot be a ``with`` statement.
        block.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(block)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self._open.pop().__exit__(None, None, None)

    @property
    def _open(self) -> list[profiler.record_function]:
        """This thread's open ranges, the innermost last; a task may itself run a pipeline."""
        if not hasattr(self._local, "open"):
            self._local.open = []
        return self._local.open  # type: ignore[no-any-return]


_profiler_ranges = ProfilerRanges()


@cache
def nvtx_ranges() -> NvtxRanges | None:
    """Return ranges in the NVTX domain "swpipe", or None if no tool is attached that shows them.

    The package has no wheels for some systems; without it there are no ranges.
    """
    try:
        import nvtx
    except ImportError:
        return None
    # Without a tool, ``nvtx`` returns a dummy domain of another class, whose calls would cost time.
    domain = nvtx.get_domain("swpipe")
    return NvtxRanges(domain) if isinstance(domain, nvtx.Domain) else None


class Observers:
    """The observers of one pipeline; calling it returns those that are active now.

    Attributes:
        everywhere: The observers of all pipelines of the process, for tools.
    """

    everywhere: tuple[Observer, ...] = ()

    def __init__(self, device: Device) -> None:
        self._has_nvtx = device.has_nvtx
        self._added: tuple[Observer, ...] = ()
        self._lock = threading.Lock()

    def __call__(self) -> tuple[Observer, ...]:
        """Return the active observers.

        The added ones come last, so that they do not time the tools.
        """
        nvtx = nvtx_ranges() if self._has_nvtx else None
        # ``torch.autograd.profiler._is_profiler_enabled`` (private, torch 2.13) is a flag of the
        # module: to read it costs nothing at every task.
        if nvtx is None and not profiler._is_profiler_enabled:
            return self._added + self.everywhere
        tools = (nvtx, _profiler_ranges if profiler._is_profiler_enabled else None)
        # Observers that are stopped last are started first: the tools' ranges enclose the added
        # observers.
        return (*(tool for tool in tools if tool is not None), *self._added, *self.everywhere)

    def adding(self, observer: Observer) -> AbstractContextManager[None]:
        """Add an observer within the block.

        Raises:
            TypeError: ``observer`` is not an object of a subclass of ``Observer``.
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
                # Compare by identity: an observer may define ``__eq__``.
                index = next(i for i, added in enumerate(self._added) if added is observer)
                # A new tuple: other threads may be iterating over the old one, without the lock.
                self._added = self._added[:index] + self._added[index + 1 :]


@contextmanager
def observing(observers: Sequence[Observer], ins: Instruction, iteration: int) -> Iterator[None]:
    """Call the observers around a task that runs within the block, outside any lane."""
    for observer in observers:
        observer.arrive(ins, iteration)
        observer.start(ins, iteration)
    try:
        yield
    finally:
        for observer in reversed(observers):
            observer.stop(ins, iteration)
