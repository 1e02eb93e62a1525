"""The recorder keeps what starts and stops before it is finished, on threads and on streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

import swpipe.trace.recorder
from swpipe import PipelinePlan, SWPipeline
from swpipe.core.plan import StreamSpec
from swpipe.core.resolved import resolve_plan
from swpipe.device import CpuDevice
from swpipe.program import Instruction, Program, compile_plan
from swpipe.trace.recorder import DeviceClock, Recorder
from swpipe.trace.span import Row, Span
from tests.support.plans_for_tests import NAMES, piped, tasks
from tests.support.stream_device import StreamDevice

PROGRAM = compile_plan(resolve_plan(piped()), streams=False)
INSTRUCTIONS = PROGRAM.instructions
FORWARD = INSTRUCTIONS["forward"]
DEFAULT = Row("thread", "default")
IO = Row("thread", "io")


class HostClock:
    """A stand-in for the recorder's clock that shows the time that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns + 10**18


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    """The recorder's clock, set to 1000."""
    clock = HostClock()
    monkeypatch.setattr(swpipe.trace.recorder, "time", clock)
    return clock


@pytest.fixture
def recorder(clock: HostClock) -> Recorder:
    """A recorder on a device without streams, whose time 0 is the clock's 1000."""
    return Recorder(PROGRAM, CpuDevice(), {})


def turn(
    recorder: Recorder,
    clock: HostClock,
    times_ns: tuple[int | None, int | None, int | None],
    ins: Instruction = FORWARD,
    iteration: int = 0,
) -> None:
    """Send a turn's arrival, start and stop to the recorder at these times; None skips one."""
    for time_ns, tell in zip(
        times_ns, (recorder.arrive, recorder.start, recorder.stop), strict=True
    ):
        if time_ns is not None:
            clock.now_ns = 1_000 + time_ns
            tell(ins, iteration)


def on_a_thread(work: Callable[[], None]) -> None:
    """Run a function on another thread, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_span_has_its_times_from_the_beginning_of_the_recording(
    recorder: Recorder, clock: HostClock
) -> None:
    """Waiting is from the arrival to the start."""
    turn(recorder, clock, (3, 10, 50), iteration=7)
    assert recorder.finish() == (Span("forward", 7, DEFAULT, 10, 50, wait_ns=7),)


def test_spans_of_all_threads_are_put_in_order(recorder: Recorder, clock: HostClock) -> None:
    """They are sorted by start, with the thread group of their lane."""
    turn(recorder, clock, (0, 40, 60))
    on_a_thread(lambda: turn(recorder, clock, (0, 5, 90), INSTRUCTIONS["h2d"], 2))
    first, second = recorder.finish()
    assert (first.task, first.row) == ("h2d", IO)
    assert (second.task, second.row) == ("forward", DEFAULT)


def test_a_start_without_its_arrival_has_no_wait(recorder: Recorder, clock: HostClock) -> None:
    """The arrival of another run is not used."""
    turn(recorder, clock, (None, 10, 20), iteration=0)
    turn(recorder, clock, (21, None, None), INSTRUCTIONS["step"], iteration=1)
    turn(recorder, clock, (None, 30, 40), iteration=1)
    turn(recorder, clock, (41, None, None), iteration=2)
    turn(recorder, clock, (None, 50, 60), iteration=3)
    assert [span.wait_ns for span in recorder.finish()] == [0, 0, 0]


def test_a_stop_without_its_start_is_no_span(recorder: Recorder, clock: HostClock) -> None:
    """Neither is a start without its stop; later runs are not affected."""
    turn(recorder, clock, (None, None, 5), iteration=0)
    turn(recorder, clock, (6, 10, 20), iteration=1)
    turn(recorder, clock, (None, None, 25), iteration=2)
    turn(recorder, clock, (26, 30, None), iteration=3)
    assert [span.iteration for span in recorder.finish()] == [1]


def test_a_task_that_runs_when_recording_ends_is_left_out(
    recorder: Recorder, clock: HostClock
) -> None:
    """Its stop comes too late, on its own thread; so does a later thread."""
    turn(recorder, clock, (0, 5, None))
    before = recorder.finish()
    turn(recorder, clock, (None, None, 20))
    on_a_thread(lambda: turn(recorder, clock, (0, 5, 9)))
    assert before == ()
    assert recorder.finish() == ()


# ---------------------------------------------------------------------------------------- streams


class Stream:
    """A stream with a time of its own, whose work is done at once."""

    def __init__(self) -> None:
        self.now_ms = 0.0


class Event:
    """An event that is reached unless ``device`` is ``late``."""

    def __init__(self, device: TimingDevice) -> None:
        self.device = device
        self.at_ms = 0.0

    def record(self, stream: Stream) -> None:
        self.at_ms = stream.now_ms

    def wait(self, stream: Stream) -> None:
        stream.now_ms = max(stream.now_ms, self.at_ms)

    def query(self) -> bool:
        return not self.device.late

    def synchronize(self) -> None:
        self.device.synchronized += 1

    def elapsed_time(self, end_event: Event) -> float:
        return end_event.at_ms - self.at_ms


class TimingDevice(StreamDevice[Stream]):
    """A device whose streams have times of their own; ``alive`` has its timing events."""

    def __init__(self) -> None:
        self.late = False
        self.alive: WeakSet[Event] = WeakSet()
        self.synchronized = 0
        super().__init__(Stream())

    def new_stream(self, spec: StreamSpec) -> Stream:
        return Stream()

    def new_event(self, *, timing: bool = False) -> Event:
        event = Event(self)
        if timing:
            self.alive.add(event)
        return event

    def work(self, ms: float) -> None:
        """Keep the current stream busy."""
        self.current_stream().now_ms += ms


WORK_MS = {"h2d": 1.0, "dist": 2.0, "forward": 3.0, "backward": 4.0, "step": 5.0}


@pytest.fixture
def device() -> TimingDevice:
    """A device whose base event is at time 0."""
    return TimingDevice()


def working(device: TimingDevice) -> dict[str, Callable[[Any], None]]:
    """Return functions that keep the streams of tasks busy for their ``WORK_MS``."""
    return {name: lambda ctx, ms=ms: device.work(ms) for name, ms in WORK_MS.items()}


def stream_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans on streams."""
    return [span for span in spans if span.row.kind == "stream"]


def test_streams_have_spans_of_their_own(device: TimingDevice) -> None:
    """Each task has one on the stream that it used, as long as its work."""
    with SWPipeline(piped(), tasks(**working(device)), device=device) as pipe:
        with pipe.trace() as trace:
            pipe.run(range(3))
    spans = stream_spans(trace.spans)
    assert sorted((span.task, span.iteration) for span in spans) == [
        (name, i) for name in sorted(NAMES) for i in range(3)
    ]
    assert {span.task: span.duration_ns for span in spans} == {
        name: ms * 1e6 for name, ms in WORK_MS.items()
    }
    assert {span.task: span.row.name for span in spans} == {
        "h2d": "memcpy",
        "dist": "dist",
        "forward": "caller's",
        "backward": "caller's",
        "step": "caller's",
    }
    copies = [span for span in spans if span.row == Row("stream", "memcpy")]
    begin_ns = copies[0].start_ns
    assert [span.start_ns - begin_ns for span in copies] == [0, 1_000_000, 2_000_000]


def recorded(device: TimingDevice, turns: int) -> tuple[Recorder, Program]:
    """Return a recorder after ``turns`` turns of one task."""
    plan = PipelinePlan.serial(["a"])
    program = compile_plan(resolve_plan(plan), streams=True)
    recorder = Recorder(program, device, {})
    ins = program.instructions["a"]
    for i in range(turns):
        recorder.start(ins, i)
        device.work(1.0)
        recorder.stop(ins, i)
    return recorder, program


def test_events_are_dropped_once_they_are_reached(device: TimingDevice) -> None:
    """If a device has no backlog, only the base event stays."""
    recorder, _ = recorded(device, turns=100)
    assert len(device.alive) == 1
    assert [s.duration_ns for s in stream_spans(recorder.finish())] == [1_000_000] * 100


def test_the_end_waits_for_a_device_that_is_behind(device: TimingDevice) -> None:
    """No event is read before the device has reached it."""
    device.late = True
    recorder, _ = recorded(device, turns=5)
    assert len(device.alive) == 1 + 2 * 5
    behind = device.synchronized
    assert len(stream_spans(recorder.finish())) == 5
    assert device.synchronized == behind + 5


class InterruptedEvent(Event):
    """An event at whose readings, for a list of times, the core does something else."""

    def __init__(self, device: TimingDevice, clock: HostClock, lost_us: list[int]) -> None:
        super().__init__(device)
        self.clock, self.lost_us = clock, lost_us

    def synchronize(self) -> None:
        self.clock.now_ns += 1000 * self.lost_us.pop(0)


@pytest.mark.parametrize(
    ("lost_us", "error_us"),
    [([20], 10), ([900, 700, 30], 15), ([900] * 9 + [300], 150)],
    ids=["at once", "in the third try", "in no try"],
)
def test_the_device_s_clock_is_read_beside_the_host_s(
    device: TimingDevice, clock: HostClock, lost_us: list[int], error_us: int
) -> None:
    """They are read again until both are close; the possible error is stored."""
    base = InterruptedEvent(device, clock, lost_us)
    read = DeviceClock(device, {}, base, origin_ns=0)
    assert read.error_ns == error_us * 1000
    assert read.time_ns(base) == clock.now_ns - error_us * 1000
    assert lost_us == []


def test_without_timing_events_only_threads_are_recorded() -> None:
    """Only one event is created, to check it; a warning says what is missing."""
    made = []
    event = SimpleNamespace(record=None, wait=None, query=None)
    untimed: Any = SimpleNamespace(
        name="x:0", has_streams=True, new_event=lambda timing: made.append(timing) or event
    )
    with pytest.warns(UserWarning, match="events of device 'x:0' have no timing; traces have no"):
        recorder = Recorder(PROGRAM, untimed, {})
    recorder.start(FORWARD, 0)
    recorder.stop(FORWARD, 0)
    assert [span.row for span in recorder.finish()] == [DEFAULT]
    assert made == [True]
