"""The common part of the tests' devices: each thread has a current stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from swpipe.device import CpuDevice

S = TypeVar("S")


class StreamDevice(CpuDevice, Generic[S]):
    """A device with streams; the subclass makes them, and events.

    Args:
        callers: The current stream of a thread that has chosen no other.
    """

    has_streams = True

    def __init__(self, callers: S) -> None:
        self.callers = callers
        self._current = threading.local()

    def current_stream(self) -> S:
        stream: S = getattr(self._current, "stream", self.callers)
        return stream

    @contextmanager
    def on(self, stream: S) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def make_current(self, stream: S) -> None:
        self._current.stream = stream
