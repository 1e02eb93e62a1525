"""Exposed times compared with known truth: tasks that sleep on a virtual clock, also overlapped.

``bench.exposed`` does the same on a real clock.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from swpipe import (
    DeclaredIO,
    IterContext,
    PipelinePlan,
    PipelineTask,
    SWPipeline,
    TaskProfiler,
    TaskSchedule,
)
from swpipe.profiler import ProfileResult
from swpipe.profiler.figures import busy_s
from swpipe.profiler.host import ThreadTimes
from tests.profiler.results import of_step
from tests.profiler.sleepers import overlapped, sleeper, sleepers
from tests.profiler.test_result import RESULT
from tests.support.virtual_clock import TimedDevice, TimedHost, tell_time

COUNTS = {"num_warmup": 1, "num_measure": 3, "num_rounds": 3}


def profiled(plan: PipelinePlan, tasks: list[PipelineTask], *, pipelined: bool) -> ProfileResult:
    """Return a profile of tasks that ignore the batch."""
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        return TaskProfiler(pipe).profile(None, pipelined=pipelined, **COUNTS)


def exactly(**milliseconds: float) -> dict[str, object]:
    """Return seconds by task, up to rounding."""
    return {name: pytest.approx(ms / 1e3, abs=1e-12) for name, ms in milliseconds.items()}


def spreads_s(result: ProfileResult) -> dict[str, float]:
    """Return the half-widths of the intervals of exposed times."""
    return {name: exposed.spread_s for name, exposed in result.exposures.items()}


def test_serially_every_task_is_exposed_in_full(host: TimedHost) -> None:
    """No task overlaps another one."""
    tasks = sleepers(host, read=4, forward=6, idle=0)
    result = profiled(PipelinePlan.serial(tasks), tasks, pipelined=False)
    assert result.baseline_s == pytest.approx(10e-3)
    assert result.exposed_s == exactly(read=4, forward=6, idle=0)
    assert spreads_s(result) == exactly(read=0, forward=0, idle=0)


def test_under_the_plan_with_three_thread_groups(host: TimedHost) -> None:
    """The busiest group's tasks are exposed down to the next busiest group.

    Threads that got ahead while another task was shortcut are no longer ahead.
    """
    tasks = sleepers(host, read=3, decode=4, copy=2, forward=5)
    plan = overlapped({"io": ["read", "decode"], "copy": ["copy"], "default": ["forward"]})
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile(None, pipelined=True, num_rounds=6)
    assert result.baseline_s == pytest.approx(7e-3)
    assert result.exposed_s == exactly(read=2, decode=2, copy=0, forward=0)
    assert spreads_s(result) == exactly(read=0, decode=0, copy=0, forward=0)


def test_a_task_that_is_slow_now_and_then_costs_its_mean(host: TimedHost) -> None:
    """Reads take 1 ms, and 40 ms every eighth time; a median would say 1 ms."""
    ran: list[int] = []

    def read(ctx: IterContext) -> None:
        ran.append(1)
        host.sleep(40e-3 if len(ran) % 8 == 0 else 1e-3)

    tasks = [PipelineTask("read", read), *sleepers(host, train=4)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile(None, num_measure=4, num_rounds=24)
    mean_s = (7 * 1e-3 + 40e-3) / 8
    assert abs(result.baseline_s - (mean_s + 4e-3)) <= result.step.spread_s
    assert abs(result.exposed_s["read"] - mean_s) <= result.exposures["read"].spread_s
    assert result.iteration.median_s == pytest.approx(5e-3)
    assert "so slow ones" in result.format_report()
    assert result.host_s["read"] == pytest.approx(mean_s, rel=0.5)


def test_a_replay_that_takes_time_does_not_change_the_result(host: TimedHost) -> None:
    """Restoring the state of a read of 6 ms takes 2 ms, which a plan may or may not hide."""
    io = DeclaredIO(lambda: None, lambda _: host.sleep(2e-3))
    read = PipelineTask("read", sleeper(host, 6), (io,))
    tasks = [read, *sleepers(host, train=3)]
    serial = profiled(PipelinePlan.serial(tasks), tasks, pipelined=False)
    assert serial.exposed_s == exactly(read=6, train=3)
    replay_s = {name: task.replay_s for name, task in serial.tasks.items()}
    assert replay_s == exactly(read=2, train=0)
    plan = overlapped({"io": ["read"], "default": ["train"]})
    piped = profiled(plan, tasks, pipelined=True)
    assert piped.exposed_s["read"] == pytest.approx(4e-3)
    assert piped.exposures["read"].spread_s == pytest.approx(1e-3)  # the truth, 3, is within


def test_device_work_is_exposed_as_far_as_no_other_stream_hides_it(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 6 ms and 8 ms on two streams, both are exposed serially, then only the difference."""
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)
    tasks = [
        PipelineTask("ahead", lambda ctx: device.launch(6e-3)),
        PipelineTask("compute", lambda ctx: device.launch(8e-3)),
    ]
    schedule = {"ahead": TaskSchedule(stream="side"), "compute": TaskSchedule(stage=1)}
    plan = PipelinePlan(schedule, deps=[("compute", "ahead")], pipeline_depth=3)
    with SWPipeline(plan, tasks, device=device, check_effects=False) as pipe:
        serial = TaskProfiler(pipe).profile(None, **COUNTS)
        piped = TaskProfiler(pipe).profile(None, pipelined=True, **COUNTS)
    assert serial.baseline_s == pytest.approx(14e-3)
    assert serial.exposed_s == exactly(ahead=6, compute=8)
    assert piped.baseline_s == pytest.approx(8e-3)
    assert piped.exposed_s == exactly(ahead=0, compute=2)
    assert serial.host_s == exactly(ahead=0, compute=0)


def test_a_task_that_waits_for_its_device_work_blocks_the_host(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that only launches does not."""
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)
    tasks = [
        PipelineTask("launch", lambda ctx: device.launch(5e-3)),
        PipelineTask("wait", lambda ctx: host.sleep_until(device.launch(5e-3))),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), device=device) as pipe:
        result = TaskProfiler(pipe).profile(None, **COUNTS)
    assert result.host_s == exactly(launch=0, wait=10)


def test_what_a_task_saves_in_others_is_told(host: TimedHost) -> None:
    """A forward whose outputs are restored leaves less work to the backward."""

    def backward(ctx: IterContext) -> None:
        host.sleep(1e-3 if "forward" in pipe.shortcut_tasks else 5e-3)

    tasks = [*sleepers(host, read=1, forward=2), PipelineTask("backward", backward)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile(None, **COUNTS)
    assert result.exposed_s == exactly(read=1, forward=6, backward=5)
    less_s = {name: task.in_others_s for name, task in result.tasks.items()}
    assert less_s == {"read": {}, "forward": exactly(backward=4), "backward": {}}


def test_a_small_change_of_others_counts_between_nothing_and_in_full(host: TimedHost) -> None:
    """It is in every iteration, as where a removal leaves other data in the caches."""

    def backward(ctx: IterContext) -> None:
        host.sleep(4.99e-3 if "forward" in pipe.shortcut_tasks else 5e-3)

    tasks = [*sleepers(host, forward=2), PipelineTask("backward", backward)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile(None, **COUNTS)
    assert result.exposed_s == exactly(forward=2.005, backward=5)
    assert spreads_s(result) == exactly(forward=0.005, backward=0)
    assert result.tasks["forward"].in_others_s == {}


def test_a_thread_group_is_busy_with_all_its_tasks() -> None:
    """The busiest come first among those that set the pace."""
    plan = overlapped({"io": ["read", "decode"], "copies": ["copy"], "default": ["train", "step"]})
    names = ("read", "decode", "copy", "train", "step")
    times = map(ThreadTimes, (1.0, 2.0, 9.5, 8.0, 2.0))
    busy = busy_s(plan, dict(zip(names, times, strict=True)))
    assert busy == {"io": 3.0, "copies": 9.5, "default": 10.0}
    assert of_step(replace(RESULT, busy_s=busy), 10.0).limiting == ("default", "copies")
