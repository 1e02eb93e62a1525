"""Record who runs when: the observer behind a trace.

    lane's thread      arrive ......... start ======= stop
                             wait_ns           span
    its stream                            o ~~~~~~~~~~~~~~~ o
                                       event    span      event

Guarantees
    - A span is kept if its start and its stop both came before ``finish``; later ones are dropped.
    - Every thread writes to a log of its own. The recorder's lock guards the list of logs, and each
      log's lock the log against ``finish``: nothing rests on the interpreter lock.
    - Events are taken from a pool that is filled again as the device gets done: a trace of any
      length holds about as many as are under way.

A lane asks who observes once per turn. Of a turn that is under way when recording begins nothing is
told, or its later part: ``start`` without ``arrive`` is taken as no wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from swpipe._engine.program import Instruction, Program
from swpipe.core.drawing import stream_name
from swpipe.device import Device, Stream
from swpipe.trace.span import OWN, Row, Span, in_order


@runtime_checkable
class TimedEvent(Protocol):
    """An event that also knows when the device reached it."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``, both reached."""


class Recorder:
    """Observes a pipeline until ``finish``.

    Args:
        program: Names the lanes of the instructions that it is told of.
        device: Where it has streams and its events tell times, streams are recorded as well.
        streams: The plan's streams, by what the plan calls them.
    """

    def __init__(self, program: Program, device: Device, streams: Mapping[Any, Stream]) -> None:
        self._rows = tuple(Row("thread", lane.group) for lane in program.lanes)
        self._origin_ns = time.perf_counter_ns()
        self._clock = DeviceClock.of(device, streams, self._origin_ns)
        self._lock = threading.Lock()
        self._logs: list[_Log] = []
        self._finished = False
        self._local = threading.local()

    def arrive(self, ins: Instruction, iteration: int) -> None:
        self._log().arrived = (ins.task, iteration, time.perf_counter_ns())

    def start(self, ins: Instruction, iteration: int) -> None:
        log = self._log()
        if log.streams is not None and ins.task not in OWN:
            log.streams.start()
        task, arrived_iteration, arrived_ns = log.arrived
        log.start_ns = time.perf_counter_ns()
        paired = (task, arrived_iteration) == (ins.task, iteration)
        log.wait_ns = log.start_ns - arrived_ns if paired else 0

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        end_ns = time.perf_counter_ns()
        log = self._log()
        start_ns, log.start_ns = log.start_ns, None
        with log.lock:
            if log.closed or start_ns is None or not exists:
                return
            row, origin_ns = self._rows[ins.lane], self._origin_ns
            start_ns, end_ns = start_ns - origin_ns, end_ns - origin_ns
            log.turns.append((ins.task, iteration, row, start_ns, end_ns, log.wait_ns))
            if log.streams is not None:
                log.streams.stop(ins.task, iteration)

    def finish(self) -> tuple[Span, ...]:
        """End the recording, wait for the device work recorded, and give all spans, in order."""
        with self._lock:
            self._finished = True
            logs = tuple(self._logs)
        spans: list[Span] = []
        for log in logs:
            with log.lock:
                log.closed = True
                spans += (Span(*turn) for turn in log.turns)
                if log.streams is not None:
                    spans += log.streams.finish()
        return in_order(spans)

    def _log(self) -> _Log:
        log: _Log | None = getattr(self._local, "log", None)
        if log is None:
            with self._lock:
                log = _Log(self._clock, closed=self._finished)
                self._logs.append(log)
            self._local.log = log
        return log


class _Log:
    """What one thread has to tell."""

    __slots__ = ("arrived", "closed", "lock", "start_ns", "streams", "turns", "wait_ns")

    def __init__(self, clock: DeviceClock | None, *, closed: bool) -> None:
        self.lock = threading.Lock()
        self.closed = closed
        # Spans to be: a span takes longer to make, and tasks run on while this one is written down.
        self.turns: list[tuple[str, int, Row, int, int, int]] = []
        self.streams = None if clock is None else _StreamLog(clock)
        self.arrived: tuple[str, int, int] = ("", -1, 0)
        self.start_ns: int | None = None
        self.wait_ns = 0


class DeviceClock:
    """Says when the device reached an event, in the host's time.

    Args:
        device: Has streams, and events that tell times.
        streams: The plan's streams, by what the plan calls them.
        base: An event of the device.
        origin_ns: What times count from, as ``time.perf_counter_ns`` tells it.
    """

    def __init__(
        self, device: Device, streams: Mapping[Any, Stream], base: TimedEvent, origin_ns: int
    ) -> None:
        self.device = device
        self._names = {stream: stream_name(ref) for ref, stream in streams.items()}
        self._base = base
        # Nothing is in the base event's way, so the device reaches it between these two looks.
        device.synchronize()
        before_ns = time.perf_counter_ns()
        base.record(device.current_stream())
        base.synchronize()
        self._base_ns = (before_ns + time.perf_counter_ns()) // 2 - origin_ns

    @classmethod
    def of(
        cls, device: Device, streams: Mapping[Any, Stream], origin_ns: int
    ) -> DeviceClock | None:
        """The device's clock; None where it has none to tell."""
        if not device.has_streams:
            return None
        base = device.new_event(timing=True)
        return cls(device, streams, base, origin_ns) if isinstance(base, TimedEvent) else None

    def row(self, stream: Stream) -> Row:
        """A stream's row; streams that the plan does not name are the caller's."""
        return Row("stream", self._names.get(stream) or stream_name(None))

    def time_ns(self, event: TimedEvent) -> int:
        """When the device reached ``event``, which it must have."""
        return self._base_ns + round(self._base.elapsed_time(event) * 1e6)


class _Pair(NamedTuple):
    task: str
    iteration: int
    row: Row
    start: TimedEvent
    end: TimedEvent


class _StreamLog:
    """What one thread gave to streams: pairs of events, made into spans once the device is done."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._under_way: deque[_Pair] = deque()
        self._pool: list[TimedEvent] = []
        self._open: TimedEvent | None = None

    def start(self) -> None:
        self._open = self._mark()

    def stop(self, task: str, iteration: int) -> None:
        start, self._open = self._open, None
        if start is None:
            return
        row = self._clock.row(self._clock.device.current_stream())
        self._under_way.append(_Pair(task, iteration, row, start, self._mark()))
        # Two at most, so that no task pays for a backlog; it shrinks all the same.
        for _ in range(2):
            if self._under_way and self._under_way[0].end.query():
                self._resolve()

    def finish(self) -> list[Span]:
        while self._under_way:
            self._under_way[0].end.synchronize()
            self._resolve()
        return self._spans

    def _mark(self) -> TimedEvent:
        device = self._clock.device
        event: Any = self._pool.pop() if self._pool else device.new_event(timing=True)
        event.record(device.current_stream())
        return event  # type: ignore[no-any-return]

    def _resolve(self) -> None:
        task, iteration, row, start, end = self._under_way.popleft()
        start_ns = self._clock.time_ns(start)
        # Far from the base event single precision blurs times; the pair's own distance stays sharp.
        end_ns = start_ns + round(start.elapsed_time(end) * 1e6)
        self._spans.append(Span(task, iteration, row, start_ns, end_ns))
        self._pool += (start, end)
