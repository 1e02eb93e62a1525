"""Exposed times against known truth: tasks that sleep, alone and overlapped."""

from __future__ import annotations

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from tests.profiler.sleepers import measured_within, overlapped, sleepers

ATTEMPTS = 10
"""A busy machine spoils many a measurement; a profiler that is wrong spoils them all."""

pytestmark = pytest.mark.slow

COUNTS = {"num_warmup": 1, "num_measure": 8, "num_rounds": 3}


def test_serially_every_task_is_exposed_in_full() -> None:
    """Nothing hides anything: exposed time is the task's own."""

    def measure() -> dict[str, tuple[float, float]]:
        tasks, truth = sleepers(read=4, forward=6, step=2)
        with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
            result = TaskProfiler(pipe).profile(None, **COUNTS)
        true_s = {name: fn.true_s for name, fn in truth.items()}
        pairs = {name: (result.exposed_s[name], true_s[name]) for name in true_s}
        return {**pairs, "baseline": (result.baseline_s, sum(true_s.values()))}

    measured_within(ATTEMPTS, measure)


def test_under_the_plan_one_task_is_hidden_and_one_half() -> None:
    """Reading takes twice the forward beside it: half of it is hidden, and all of the forward."""

    def measure() -> dict[str, tuple[float, float]]:
        tasks, truth = sleepers(read=8, forward=4)
        plan = overlapped({"io": ["read"], "default": ["forward"]})
        with SWPipeline(plan, tasks) as pipe:
            result = TaskProfiler(pipe).profile(None, pipelined=True, **COUNTS)
        read_s, forward_s = truth["read"].true_s, truth["forward"].true_s
        return {
            "baseline": (result.baseline_s, read_s),
            "read": (result.exposed_s["read"], read_s - forward_s),
            "forward": (result.exposed_s["forward"], 0.0),
        }

    measured_within(ATTEMPTS, measure)


def test_under_the_plan_with_three_thread_groups() -> None:
    """The busiest group sets the pace; each of its tasks is exposed down to the next busiest."""

    def measure() -> dict[str, tuple[float, float]]:
        tasks, truth = sleepers(read=3, decode=4, copy=2, forward=5)
        plan = overlapped({"io": ["read", "decode"], "copy": ["copy"], "default": ["forward"]})
        with SWPipeline(plan, tasks) as pipe:
            result = TaskProfiler(pipe).profile(None, pipelined=True, **COUNTS)
        s = {name: fn.true_s for name, fn in truth.items()}
        pace_s = s["read"] + s["decode"]
        true_s = {
            "read": pace_s - max(s["decode"], s["forward"]),
            "decode": pace_s - max(s["read"], s["forward"]),
            "copy": 0.0,
            "forward": 0.0,
        }
        pairs = {name: (result.exposed_s[name], true_s[name]) for name in true_s}
        return {**pairs, "baseline": (result.baseline_s, pace_s)}

    measured_within(ATTEMPTS, measure)


def test_a_deeper_pipeline_tells_the_same() -> None:
    """Threads that run ahead make single periods uneven; what is measured does not show it."""

    def measure() -> dict[str, tuple[float, float]]:
        tasks, truth = sleepers(read=2, forward=5)
        shallow = overlapped({"io": ["read"], "default": ["forward"]})
        plan = PipelinePlan(shallow.schedule, deps=shallow.deps, pipeline_depth=4)
        with SWPipeline(plan, tasks) as pipe:
            result = TaskProfiler(pipe).profile(None, pipelined=True, **COUNTS)
        read_s, forward_s = truth["read"].true_s, truth["forward"].true_s
        return {
            "read": (result.exposed_s["read"], 0.0),
            "forward": (result.exposed_s["forward"], forward_s - read_s),
        }

    measured_within(ATTEMPTS, measure)


def test_a_task_that_costs_nothing_reads_zero_within_its_spread() -> None:
    """Serially and under the plan, beside tasks that cost something."""
    tasks, _ = sleepers(read=2, forward=3)
    idle = PipelineTask("idle", _nothing)
    tasks = [tasks[0], idle, tasks[1]]
    plan = overlapped({"io": ["read"], "default": ["idle", "forward"]})
    with SWPipeline(plan, tasks) as pipe:
        for pipelined in (False, True):
            result = TaskProfiler(pipe).profile(None, pipelined=pipelined, **COUNTS)
            assert result.exposed_s["idle"] <= result.spread_s["idle"]


def test_sleeping_tasks_block_the_host() -> None:
    """The report names them and for how long, the longest first."""
    tasks, truth = sleepers(read=2, forward=4)
    tasks.append(PipelineTask("idle", _nothing))
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        result = TaskProfiler(pipe).profile(None, **COUNTS)
    assert result.blocking == ("forward", "read")
    for name in result.blocking:
        assert 0.8 * truth[name].seconds <= result.blocked_s[name] <= result.host_s[name]
    assert result.host_s["idle"] < 1e-3


def _nothing(ctx: IterContext) -> None:
    return None
