"""The observer behind a trace, which records when each task runs.

    thread             arrive ......... start ======= stop
                             wait_ns           span
    its stream                            o ~~~~~~~~~~~~~~~ o
                                       event    span      event

Guarantees
    - A span is recorded if its start and its stop both come before ``finish``.
    - Every thread writes to its own log. The recorder's lock protects the list of logs, and each
      log's lock protects the log from ``finish``; none of this needs the interpreter lock.
    - With ``last``, memory is bounded by that many iterations, however long the recording.
    - Events are dropped once the device has reached them, so the number of events is limited by the
      work in flight, not by the length of the trace.

If recording starts while a task runs, the recorder may see only a part of its calls: ``start``
without ``arrive`` counts as no wait, and ``stop`` without ``start`` is ignored.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from swpipe._engine.iterations import Engine
from swpipe.core.drawing import stream_name
from swpipe.core.resolved import ResolvedPlan
from swpipe.device import Device, Stream
from swpipe.program import ADMIT, OWN, Instruction, Program
from swpipe.trace.perfetto import arrows_of
from swpipe.trace.span import Row, Span, in_order
from swpipe.trace.trace import Trace

_GOOD_READING_NS = 50_000
_READINGS = 10
"""The accepted error of a reading of the device's clock, and the number of tries."""


def timed_event(device: Device) -> Any:
    """Return a new event that tells when the device reached it; None if it has no such events.

    Warns:
        RuntimeWarning: The device has streams, but its events have no timing.
    """
    if not device.has_streams:
        return None
    try:
        event: Any = device.new_event(timing=True)
        # Tried out, since some backends have the method and raise when it is called.
        if hasattr(event, "elapsed_time"):
            event.record(device.current_stream())
            event.synchronize()
            event.elapsed_time(event)
            return event
        why = ""
    except (NotImplementedError, RuntimeError) as error:
        why = f": {str(error).partition(chr(10))[0]}"
    warnings.warn(
        f"the events of device {device.name!r} have no timing{why}; traces have no spans of "
        "streams, and profiles have times of the host's clock",
        stacklevel=3,
    )
    return None


class Recorder:
    """The observer of a pipeline until ``finish``; of streams too, if the device has timing events.

    Args:
        last: Keep only this many iterations, the last ones; None for all.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        streams: Mapping[Any, Stream],
        last: int | None = None,
    ) -> None:
        self._rows = [[Row("thread", name) for name in lane.threads] for lane in program.lanes]
        self._last = last
        self._origin_ns = time.perf_counter_ns()  # the time 0 of all spans
        base = timed_event(device)
        self._clock = DeviceClock(device, streams, base, self._origin_ns) if base else None
        self._lock = threading.Lock()
        self._logs: list[_Log] = []
        self._finished = False
        self._local = threading.local()

    def arrive(self, ins: Instruction, iteration: int) -> None:
        """Note that a thread has arrived at a task, and may have to wait."""
        self._log().arrived = (ins.task, iteration, time.perf_counter_ns())

    def start(self, ins: Instruction, iteration: int) -> None:
        """Note that a task starts on this thread."""
        log = self._log()
        if log.streams is not None and ins.task not in OWN:
            log.streams.start()
        # A recording that began between arrive and start has no arrival for this task, but another
        # one's.
        *arrived, arrived_ns = log.arrived
        # Read last, so that the recorder's own work before the task counts as wait and not as task.
        log.start_ns = time.perf_counter_ns()
        log.wait_ns = log.start_ns - arrived_ns if arrived == [ins.task, iteration] else 0

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """Add the span of a task that has ended; without a span if its iteration does not exist."""
        # Read first, for the same reason as in start.
        end_ns = time.perf_counter_ns() - self._origin_ns
        log = self._log()
        start_ns = log.start_ns
        log.start_ns = None
        with log.lock:
            if log.closed or start_ns is None:
                return
            if not exists:  # the last run is then the <admit> that found no iteration
                if log.runs and log.runs[-1][:2] == (ADMIT, iteration):
                    log.runs.pop()
                return
            start_ns -= self._origin_ns
            # Iterations go to the workers of a group round robin, so the number says which worker
            # ran this one.
            rows = self._rows[ins.lane]
            row = rows[iteration % len(rows)]
            log.runs.append((ins.task, iteration, row, start_ns, end_ns, log.wait_ns))
            if log.streams is not None:
                log.streams.stop(ins.task, iteration)
            if self._last is not None and ins.task != ADMIT:  # <admit> may find no iteration
                log.forget(iteration - self._last)

    def finish(self) -> tuple[Span, ...]:
        """End the recording, wait for the recorded device work, and return all spans in order."""
        with self._lock:
            self._finished = True
            logs = tuple(self._logs)
        spans: list[Span] = []
        for log in logs:
            with log.lock:
                log.closed = True
                spans += (Span(*run) for run in log.runs)
                if log.streams is not None:
                    spans += log.streams.finish()
        # Each thread has dropped old iterations at its own pace: now all begin with the same one.
        if self._last is not None and spans:
            newest = max(span.iteration for span in spans)
            spans = [span for span in spans if span.iteration > newest - self._last]
        return in_order(spans)

    def _log(self) -> _Log:
        """Return the log of this thread."""
        log: _Log | None = getattr(self._local, "log", None)
        if log is None:
            with self._lock:
                log = self._local.log = _Log(self._clock, closed=self._finished)
                self._logs.append(log)
        return log


@contextmanager
def traced(
    engine: Engine,
    resolved: ResolvedPlan,
    last: int | None,
    observing: Callable[[Recorder], AbstractContextManager[None]],
) -> Iterator[Trace]:
    """Record what the engine does within the block; ``observing`` adds the recorder to it.

    Raises:
        ValueError: ``last`` is below 1.
    """
    if last is not None and last < 1:
        raise ValueError(f"last is {last}: keep 1 iteration or more, or None for all")
    recorder = Recorder(engine.program, engine.device, engine.streams, last)
    trace = Trace(arrows=arrows_of(resolved))
    try:
        with observing(recorder):
            yield trace
    finally:
        trace.spans = recorder.finish()


class _Log:
    """The records of one thread."""

    def __init__(self, clock: DeviceClock | None, *, closed: bool) -> None:
        self.lock = threading.Lock()
        self.closed = closed
        # The arguments of spans: a tuple is faster to create than a span.
        self.runs: deque[tuple[str, int, Row, int, int, int]] = deque()
        self.streams = None if clock is None else _StreamLog(clock)
        self.arrived: tuple[str, int, int] = ("", -1, 0)
        self.start_ns: int | None = None
        self.wait_ns = 0

    def forget(self, iteration: int) -> None:
        """Drop the spans of this iteration and earlier ones."""
        while self.runs and self.runs[0][1] <= iteration:
            self.runs.popleft()
        if self.streams is not None:
            while self.streams.spans and self.streams.spans[0].iteration <= iteration:
                self.streams.spans.popleft()


class DeviceClock:
    """A conversion of events to nanoseconds from ``origin_ns``, a ``time.perf_counter_ns``.

    Attributes:
        error_ns: The largest error of the converted times.
    """

    def __init__(
        self, device: Device, streams: Mapping[Any, Stream], base: Any, origin_ns: int
    ) -> None:
        self.device = device
        self._names = {stream: stream_name(ref) for ref, stream in streams.items()}
        self._base = base
        # The device is idle, so it reaches the base event between these two clock reads. Another
        # process may take the core in between; in that case the reading is repeated.
        device.synchronize()
        for _ in range(_READINGS):
            before_ns = time.perf_counter_ns()
            base.record(device.current_stream())
            base.synchronize()
            self.error_ns = (time.perf_counter_ns() - before_ns + 1) // 2
            if self.error_ns <= _GOOD_READING_NS:
                break
        self._base_ns = before_ns + self.error_ns - origin_ns

    def row(self, stream: Stream) -> Row:
        """Return the row of a stream; a stream without a name in the plan is the caller's."""
        return Row("stream", self._names.get(stream) or stream_name(None))

    def time_ns(self, event: Any) -> int:
        """Return when the device reached ``event``; it must have reached the event already."""
        after_ms: float = self._base.elapsed_time(event)
        return self._base_ns + round(after_ms * 1e6)


class _StreamLog:
    """One thread's work on streams: pairs of events that become spans once both are reached."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.spans: deque[Span] = deque()
        self._in_flight: deque[tuple[str, int, Row, Any, Any]] = deque()
        self._open: Any | None = None

    def start(self) -> None:
        """Mark the beginning of a task's work on the current stream."""
        self._open = self._mark()

    def stop(self, task: str, iteration: int) -> None:
        """Mark the end of a task's work, and convert events that the device has reached."""
        start = self._open
        self._open = None
        # The recording began while this task ran.
        if start is None:
            return
        row = self._clock.row(self._clock.device.current_stream())
        self._in_flight.append((task, iteration, row, start, self._mark()))
        # At most two, to bound the cost for this task; the backlog still shrinks.
        for _ in range(2):
            if self._in_flight and self._in_flight[0][-1].query():
                self._resolve()

    def finish(self) -> Iterable[Span]:
        """Wait for all marked work, and return its spans."""
        while self._in_flight:
            self._in_flight[0][-1].synchronize()
            self._resolve()
        return self.spans

    def _mark(self) -> Any:
        """Return an event recorded on the current stream."""
        device = self._clock.device
        event: Any = device.new_event(timing=True)
        event.record(device.current_stream())
        return event

    def _resolve(self) -> None:
        """Convert the oldest pair of events to a span."""
        task, iteration, row, start, end = self._in_flight.popleft()
        start_ns = self._clock.time_ns(start)
        # Times far from the base event are rounded to single precision; the duration is not.
        end_ns = start_ns + round(start.elapsed_time(end) * 1e6)
        self.spans.append(Span(task, iteration, row, start_ns, end_ns))
