"""The spans of devices in traces, the profiler's figures, and ranges of torch's profiler."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
from torch.profiler import profile

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe.trace.span import Span
from tests import backend
from tests.device.accelerator.work import (
    DEVICE,
    SIMULATED,
    covered,
    needs_gpu_clock,
    own_stream,
    spin,
    warm_up,
)

MS = 1e-3
CLOCK_NS = 1_000_000
"""The limit for the error of the device's times, converted to the host's clock."""
EARLY_NS = 5_000_000_000 if SIMULATED else 200_000
"""The time by which a span may begin before its work was submitted, as a thread may wait."""
LEAST, MOST = 0.99, float("inf") if SIMULATED else 1.15
"""Limits for the ratio of measured to true time: the test backend's work takes longer on a busy
machine. ``tests/profiler/test_truth.py`` compares exact figures on a virtual clock."""


def spinning(name: str, ms: float) -> PipelineTask:
    """Return a task whose device work takes ``ms``."""
    return PipelineTask(name, lambda ctx: spin(ms))


def two_streams() -> PipelinePlan:
    """Return a plan of 6 ms and 8 ms of device work that overlap."""
    return PipelinePlan(
        {
            spinning("ahead", 6.0): TaskSchedule(0, "side"),
            spinning("compute", 8.0): TaskSchedule(1),
        },
        deps=[("compute", "ahead")],
        pipeline_depth=3,
    )


def device_spans() -> dict[tuple[str, int], Span]:
    """Return the span of each task and iteration on its stream, in the steady state."""
    warm_up()
    with SWPipeline(two_streams(), device=DEVICE, check_effects=False) as pipe:  # which takes time
        pipe.run(range(5))
        if SIMULATED:
            backend.clear_log()
        with pipe.trace() as trace:
            pipe.run(range(20))
    return {(span.task, span.iteration): span for span in trace.spans if span.row.kind == "stream"}


def test_a_trace_has_the_streams_spans() -> None:
    """Each task has a span on its stream, as long as its device work."""
    spans = device_spans()
    assert {span.row.name for span in spans.values()} == {"side", "caller's"}
    for name, ms in (("ahead", 6.0), ("compute", 8.0)):
        lengths = [span.duration_ns / 1e6 for (task, _), span in spans.items() if task == name]
        assert len(lengths) == 20
        assert LEAST * ms <= median(lengths) <= MOST * ms


@needs_gpu_clock
def test_streams_overlap_in_a_trace() -> None:
    """They overlap in the trace as on the device."""
    spans = device_spans()
    ahead = [(s.start_ns, s.end_ns) for (task, _), s in spans.items() if task == "ahead"]
    for i in range(10, 20):
        compute = spans["compute", i]
        assert covered((compute.start_ns, compute.end_ns), ahead) > 0.5


@pytest.mark.skipif(not SIMULATED, reason="needs a device that writes a log")
def test_a_trace_agrees_with_the_devices_own_log() -> None:
    """Times on both differ by one offset: then every span contains its work in the log.

    A span may be longer than the work on a busy machine: its events are before and after. The log
    is in the order of the streams.
    """
    spans = device_spans()
    log = [work for work in backend.log() if work.name == "lag"]
    streams = {work.stream_id for work in log}
    assert len(streams) == 2
    side, callers = sorted(streams, reverse=True)  # the default stream is the caller's
    assert callers == 0
    least, most = [], []
    for row, stream in (("side", side), ("caller's", callers)):
        on_row = [spans[key] for key in sorted(spans) if spans[key].row.name == row]
        works = [work for work in log if work.stream_id == stream]
        for span, work in zip(on_row, works, strict=True):
            least.append(work.end_ns - span.end_ns)
            most.append(work.start_ns - span.start_ns)
    assert max(least) <= min(most) + CLOCK_NS


def test_a_stream_object_has_its_own_row() -> None:
    """It is distinct from the caller's stream in the trace, too."""
    mine = own_stream()
    warm_up()
    plan = PipelinePlan({spinning("a", 1.0): TaskSchedule(0, mine)})
    with SWPipeline(plan, device=DEVICE) as pipe, pipe.trace() as trace:
        pipe.run(range(3))
    rows = {span.row.name for span in trace.spans if span.row.kind == "stream"}
    assert rows == {f"torch.Stream({mine.stream_id})"}


def test_device_spans_lie_within_the_trace() -> None:
    """Device times are converted to host time: no work begins before it was submitted."""
    warm_up()
    pipe = SWPipeline(two_streams(), device=DEVICE, check_effects=False)
    with pipe, pipe.trace() as trace:
        pipe.run(range(10))
    submitted = {(s.task, s.iteration): s for s in trace.spans if s.row.kind == "thread"}
    for span in trace.spans:
        if span.row.kind == "stream":
            assert span.start_ns > submitted[span.task, span.iteration].start_ns - EARLY_NS


@pytest.mark.parametrize(("pipelined", "ms"), [(False, 14.0), (True, 8.0)])
def test_the_profiler_waits_for_device_work(pipelined: bool, ms: float) -> None:
    """Serially both tasks take their time; under the plan the shorter one is hidden."""
    warm_up()
    with SWPipeline(two_streams(), device=DEVICE, check_effects=False) as pipe:  # which takes time
        result = TaskProfiler(pipe).profile(None, pipelined=pipelined)
    assert LEAST * ms * MS <= result.baseline_s <= MOST * ms * MS
    if not SIMULATED:
        exposed_ms = {"ahead": 0.0, "compute": 2.0} if pipelined else {"ahead": 6.0, "compute": 8.0}
        for name, true_ms in exposed_ms.items():
            assert result.exposed_s[name] == pytest.approx(true_ms * MS, abs=1.2 * MS)


def test_the_profiler_tells_who_blocks_the_host() -> None:
    """A task that waits for the device blocks its thread; one that only launches does not."""

    def wait(ctx: IterContext) -> None:
        spin(5.0)
        torch.accelerator.current_stream().synchronize()

    warm_up()
    tasks = [spinning("launch", 5.0), PipelineTask("wait", wait)]
    with SWPipeline(PipelinePlan.serial(tasks), device=DEVICE) as pipe:
        result = TaskProfiler(pipe).profile(None)
    assert result.host_s["wait"] > 4.0 * MS
    assert SIMULATED or result.host_s["launch"] < 1.0 * MS


def test_a_torch_profiler_sees_each_task() -> None:
    """``record_function`` ranges name the task, and device kernels are seen too."""
    warm_up()
    with (
        SWPipeline(two_streams(), device=DEVICE) as pipe,
        profile(activities=torch.profiler.supported_activities()) as seen,
    ):
        pipe.run(range(3))
        torch.accelerator.synchronize()
    rows = {row.key: row.count for row in seen.key_averages()}
    assert (rows["ahead"], rows["compute"]) == (3, 3)


@needs_gpu_clock
def test_looking_costs_nothing_when_nobody_looks() -> None:
    """A run without observers takes no longer than its device work."""
    warm_up()
    with SWPipeline(two_streams(), device=DEVICE, check_effects=False) as pipe:  # which takes time
        pipe.run(range(5))
        begin = time.perf_counter()
        pipe.run(range(50))
        seconds = time.perf_counter() - begin
    assert seconds < 1.15 * (50 * 8.0 + 6.0) * MS
