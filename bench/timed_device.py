"""A device made of threads: each stream does what it is given, in order, and takes real time.

It stands in for an accelerator where there is none, to measure how well streams stay busy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from swpipe import StreamSpec
from tests.support.stream_device import StreamDevice


class TimedStream:
    """A thread that runs its work in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="timed-stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class TimedEvent:
    """A point in a stream's work; recording it again moves it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self._at_s = 0.0

    def record(self, stream: TimedStream) -> None:
        reached = self._reached = threading.Event()

        def reach() -> None:
            self._at_s = time.perf_counter()
            reached.set()

        stream.put(reach)

    def wait(self, stream: TimedStream) -> None:
        stream.put(self._reached.wait)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, end_event: TimedEvent) -> float:
        return (end_event._at_s - self._at_s) * 1e3


class TimedDevice(StreamDevice[TimedStream]):
    """A device with such streams; leaving its context ends them."""

    def __init__(self) -> None:
        self._streams: list[TimedStream] = []
        super().__init__(self.new_stream(StreamSpec()))

    def __enter__(self) -> TimedDevice:
        return self

    def __exit__(self, *failure: object) -> None:
        for stream in self._streams:
            stream.close()

    def launch(self, work: Callable[[], object]) -> None:
        """Queue ``work`` on the current stream and return at once."""
        self.current_stream().put(work)

    def new_stream(self, spec: StreamSpec) -> TimedStream:
        stream = TimedStream()
        self._streams.append(stream)
        return stream

    def new_event(self, *, timing: bool = False) -> TimedEvent:
        return TimedEvent()

    def synchronize(self) -> None:
        for stream in self._streams:
            done = threading.Event()
            stream.put(done.set)
            done.wait()
