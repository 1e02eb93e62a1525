"""A virtual clock: threads and streams take time, and take exactly their time.

    thread A   ==== sleep(5 ms) .............. ====
    thread B        ==== sleep(3 ms) ..... ====
    clock      0                     ^ 3 ms   ^ 5 ms    no thread can run: it jumps to the next end

One thread runs at a time (``tests.support.exploring``), and running takes no time. Only ``sleep``
and ``compute`` take time: the thread stops until the clock has reached the end of it. When all
threads have stopped, the clock jumps to the earliest end. All times are thus known to the
nanosecond, however slow the machine is, and whichever thread runs first at one moment.

The work of a stream ends after all earlier work of the stream, and takes its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

import swpipe._engine.iterations
import swpipe.pipeline
import swpipe.profiler.costing
import swpipe.profiler.host
import swpipe.profiler.measure
import swpipe.run_report
import swpipe.trace.recorder
from swpipe import IterContext, PipelineTask, StreamSpec
from swpipe.core.costs import CostModel
from tests.support.exploring import ExploringHost, _Fiber
from tests.support.stream_device import StreamDevice


class TimedHost(ExploringHost):
    """Threads that take virtual time; made on the thread that drives the pipeline.

    An object can replace the module ``time``.

    Args:
        seed: Decides who goes first among threads that can run at the same moment.

    Attributes:
        now_ns: The time, from 0.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.now_ns = 0
        self._wake_ns: list[int] = []

    def sleep(self, seconds: float) -> None:
        """Sleep for some virtual time, while other threads run."""
        self.sleep_until(self.now_ns + round(seconds * 1e9))

    def sleep_until(self, then_ns: int) -> None:
        """Sleep until a time; return at once if it has passed."""
        if then_ns > self.now_ns:
            self._wake_ns.append(then_ns)
            self.wait_until(lambda: self.now_ns >= then_ns, f"{then_ns} ns")
            self._wake_ns.remove(then_ns)

    def compute(self, seconds: float) -> None:
        """Compute for some virtual time."""
        self.sleep(seconds)
        self._local.cpu_ns = getattr(self._local, "cpu_ns", 0) + round(seconds * 1e9)

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.perf_counter()

    def thread_time(self) -> float:
        return getattr(self._local, "cpu_ns", 0) / 1e9

    def _ready(self) -> list[_Fiber]:
        ready = super()._ready()
        if not ready and self._wake_ns:
            self.now_ns = min(self._wake_ns)
            ready = super()._ready()
        return ready


class TimedStream:
    """A stream, with the time at which all its work is done."""

    def __init__(self) -> None:
        self.end_ns = 0


class TimedEvent:
    """A point in a stream's work, and the time at which it is reached."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self.at_ns = 0

    def record(self, stream: TimedStream) -> None:
        self.at_ns = max(stream.end_ns, self._device.host.now_ns)

    def wait(self, stream: TimedStream) -> None:
        stream.end_ns = max(stream.end_ns, self.at_ns)

    def query(self) -> bool:
        self._device.asked_ns = self.at_ns
        return self.at_ns <= self._device.host.now_ns

    def synchronize(self) -> None:
        self._device.host.sleep_until(self.at_ns)

    def elapsed_time(self, end_event: TimedEvent) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


class TimedDevice(StreamDevice[TimedStream]):
    """A device whose streams take virtual time.

    Attributes:
        host: The host, which has the clock.
        asked_ns: When the event is reached that somebody asked for last.
    """

    def __init__(self, host: TimedHost) -> None:
        self.host = host
        self.asked_ns = 0
        self._streams: list[TimedStream] = []
        self._resources: dict[str, TimedStream] = defaultdict(TimedStream)
        super().__init__(self.new_stream(StreamSpec()))

    def launch(self, seconds: float, resources: Iterable[str] = ()) -> int:
        """Keep the current stream busy for some time, and return at once the time of its end.

        A resource, such as a communicator, also works in the order of launches.
        """
        used = [self.current_stream(), *(self._resources[name] for name in resources)]
        begin_ns = max(self.host.now_ns, *(each.end_ns for each in used))
        for each in used:
            each.end_ns = begin_ns + round(seconds * 1e9)
        return used[0].end_ns

    def look_again(self, seconds: float) -> None:
        """Sleep until the queried event is reached, since queries take no time."""
        self.host.sleep_until(self.asked_ns)

    def new_stream(self, spec: StreamSpec) -> TimedStream:
        self._streams.append(TimedStream())
        return self._streams[-1]

    def new_event(self, *, timing: bool = False) -> TimedEvent:
        return TimedEvent(self)

    def synchronize(self) -> None:
        self.host.sleep_until(max(stream.end_ns for stream in self._streams))


def tell_time(
    monkeypatch: pytest.MonkeyPatch, host: TimedHost, device: TimedDevice | None = None
) -> None:
    """Let swpipe use the host's threads and clock, and wait for the device there."""
    monkeypatch.setattr(swpipe.pipeline, "Host", lambda: host)
    profiler = swpipe.profiler
    for module in (
        profiler.costing,
        profiler.host,
        profiler.measure,
        swpipe.run_report,
    ):
        monkeypatch.setattr(module, "time", host)
    monkeypatch.setattr(swpipe.trace.recorder, "time", host)
    # What other processes use of the machine says nothing about this time.
    monkeypatch.setattr(profiler.rounds, "load_so_far", lambda **given: None)
    monkeypatch.setattr(profiler.host, "core_wait_s", lambda: 0.0)
    if device is not None:
        monkeypatch.setattr(swpipe._engine.iterations, "time", _Looks(device))


class _Looks:
    """The engine's ``time``, which only sleeps between two queries of an event."""

    def __init__(self, device: TimedDevice) -> None:
        self.sleep = device.look_again
        self.monotonic = device.host.monotonic


def tasks_that_take(
    costs: CostModel, host: TimedHost, device: TimedDevice | None = None
) -> list[PipelineTask]:
    """Return tasks that take their costs; without a device, all of it on their threads.

    Resources are for device work only.
    """

    def task(name: str) -> PipelineTask:
        cost = costs.tasks[name]
        host_us = cost.host_us if device is not None else cost.total_us

        def fn(ctx: IterContext) -> None:
            host.sleep(host_us / 1e6)
            if device is not None:
                done_ns = device.launch(
                    cost.device_us / 1e6, cost.resources if cost.device_us else ()
                )
                if cost.blocks:
                    host.sleep_until(done_ns)

        return PipelineTask(name, fn)

    return [task(name) for name in costs.tasks]
