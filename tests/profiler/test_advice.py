"""Advice on tasks of known cost; following it gives what was promised."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.plans import prefetch_plan
from swpipe.profiler import Advice, ProfileResult
from tests.profiler.sleepers import InTurn, overlapped, sleepers
from tests.support.virtual_clock import TimedHost

DEPS = [("train", "read"), ("step", "train")]
LOOP = {"deps": DEPS, "cross_iter_deps": [("train", "step")]}
ITS_THREAD = "call the loader on a thread of its own, if it uses nothing that the loop changes"
ONE_THREAD = PipelinePlan({n: TaskSchedule() for n in ("read", "train", "step")}, **LOOP)


def profiled(plan: PipelinePlan, tasks: list[PipelineTask], *, pipelined: bool) -> ProfileResult:
    """Return a profile with all advice."""
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        return TaskProfiler(pipe).profile(None, pipelined=pipelined)


def tried(advice: Advice, tasks: list[PipelineTask]) -> float:
    """Return the seconds per iteration under the advised plan."""
    plan = advice.plan
    return profiled(plan, tasks, pipelined=True).baseline_s


def test_the_largest_lever_gives_what_it_promises(host: TimedHost) -> None:
    """Reading ahead hides all of the read behind training and step."""
    tasks = sleepers(host, read=6, train=7, step=2)
    result = profiled(ONE_THREAD, tasks, pipelined=True)
    first = result.advice[0]
    assert first.change == "run read on a thread of its own, one iteration ahead"
    assert first.saved_s == pytest.approx(6e-3)
    assert first.saved.spread_s == pytest.approx(0.1 * 9e-3)  # of what is predicted: 7 + 2
    assert result.baseline_s - tried(first, tasks) == pytest.approx(first.saved_s)
    assert "train, step" in first.limit
    assert f"do next, 1: {first.change}: saves 6.000" in result.format_report()


def test_the_thread_of_a_plans_loader_takes_none_from_the_tasks(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores, a serial profile of a plan that pulls on a thread pulls on the caller's."""
    monkeypatch.setattr("swpipe.profiler.advice.cores", lambda: 2)
    tasks = sleepers(host, read=6, train=7, step=2)
    plan = prefetch_plan(["read"], ["train", "step"], carried=[("train", "step")])
    assert plan.pull_group is not None
    first = profiled(plan, tasks, pipelined=False).advice[0]
    assert first.change == "run read on a thread of its own, one iteration ahead"
    assert first.saved_s == pytest.approx(6e-3)


def test_each_of_several_workers_is_busy_for_its_share(host: TimedHost) -> None:
    """A group is not busy for longer than an iteration takes."""
    tasks = sleepers(host, read=20, train=10)
    plan = prefetch_plan(["read"], ["train"], workers=2)
    result = profiled(plan, tasks, pipelined=True)
    assert result.baseline_s == pytest.approx(10e-3)
    assert result.busy_s == pytest.approx({"default": 10e-3, "io": 10e-3})


def test_no_more_is_promised_than_the_moved_tasks_expose(host: TimedHost) -> None:
    """Two tasks hide each other: neither costs anything while the other exists."""
    tasks = sleepers(host, left=6, right=6, train=7, step=2)
    schedule = {name: TaskSchedule() for name in ("left", "right", "train", "step")}
    schedule |= {name: TaskSchedule(thread_group=name) for name in ("left", "right")}
    deps = [("train", "left"), ("train", "right"), ("step", "train")]
    plan = PipelinePlan(schedule, deps=deps, cross_iter_deps=[("train", "step")], pipeline_depth=1)
    result = profiled(plan, tasks, pipelined=True)
    assert result.baseline_s == pytest.approx(15e-3)
    assert [result.exposed_s[name] for name in ("left", "right")] == pytest.approx([0, 0], abs=1e-9)
    assert {advice.plan for advice in result.advice} == {None}


def test_what_stands_in_the_way_is_named(host: TimedHost) -> None:
    """Training and its step, which it has to wait for, fill the caller's thread."""
    tasks = sleepers(host, read=1, train=7, step=2)
    plan = PipelinePlan(
        {
            "read": TaskSchedule(thread_group="io"),
            "train": TaskSchedule(stage=1),
            "step": TaskSchedule(stage=1),
        },
        **LOOP,
    )
    result = profiled(plan, tasks, pipelined=True)
    first = result.advice[0]
    assert first.change == "make train take half as long"
    assert first.saved_s == pytest.approx(3.5e-3)
    assert first.plan is None
    busy = "thread 'default', which is busy all the time (step, train)"
    assert first.not_moved == f"iterations would be limited by {busy}"
    assert f"Not moved: {first.not_moved}." in first.text
    assert [advice.task for advice in result.advice] == ["train", "step"]  # reading is hidden


def test_a_task_of_which_nothing_is_declared_is_not_moved(host: TimedHost) -> None:
    """The body of the loop may change what it uses; the advice says what to declare."""
    read, *others = sleepers(host, read=6, train=7, step=2)
    tasks = [replace(read, pure=False), *others]
    result = profiled(ONE_THREAD, tasks, pipelined=False)
    about = {advice.task: advice for advice in result.advice}
    assert about["read"].plan is None
    why = about["read"].not_moved
    assert why.startswith("'read' does not declare what it uses, and the loop's body may change")
    assert why.endswith("give the task pure=True, or its states by io=[DeclaredIO(state=...)]")


def test_without_dependences_between_iterations_no_task_is_moved(host: TimedHost) -> None:
    """It is not known which tasks may move."""
    tasks = sleepers(host, read=6, train=7)
    for plan in (PipelinePlan.serial(tasks), overlapped({"default": ["read", "train"]})):
        result = profiled(plan, tasks, pipelined=False)
        assert {advice.plan for advice in result.advice} == {None}
        assert [advice.saved_s for advice in result.advice] == pytest.approx([3.5e-3, 3e-3])


def test_the_cores_limit_what_threads_can_save(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core, a separate thread does not make Python faster."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    tasks = [
        PipelineTask("read", lambda ctx: host.compute(6e-3)),
        *sleepers(host, train=1),
        PipelineTask("step", lambda ctx: host.compute(6e-3)),
    ]
    result = profiled(ONE_THREAD, tasks, pipelined=False)
    moved = [advice for advice in result.advice if advice.plan]
    assert all(advice.saved_s <= 1e-3 + 1e-9 for advice in moved)
    assert all(advice.limit == "the 1 cores" for advice in moved)


def test_ranks_of_one_machine_share_its_cores(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on two cores save by threads what one rank saves on one core: nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    tasks = [
        PipelineTask("read", lambda ctx: host.compute(6e-3), pure=True),
        PipelineTask("train", lambda ctx: host.compute(7e-3), pure=True),
        *sleepers(host, step=1),
    ]
    moved = {}
    for ranks in ("1", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        advice = profiled(ONE_THREAD, tasks, pipelined=False).advice
        moved[ranks] = [one.saved_s for one in advice if one.plan]
    assert moved["1"] == pytest.approx([6e-3])
    assert moved["2"] == []


def test_nothing_is_promised_where_nothing_may_be_saved(host: TimedHost) -> None:
    """The interval contains 0, by the prediction's error or the noise of the measurement."""
    tasks = sleepers(host, read=2, train=20, step=4)
    result = profiled(ONE_THREAD, tasks, pipelined=False)
    assert {advice.plan for advice in result.advice} == {None}
    about = {advice.task: advice.not_moved for advice in result.advice}
    assert about["train"] == "another plan might save 2.000 ± 2.400 ms, and may save nothing"
    noise = random.Random(7)  # the error of the prediction alone is smaller than what is saved

    def read(ctx: IterContext) -> None:
        host.sleep(24e-3 if noise.random() < 1 / 8 else 0.0)

    noisy = [PipelineTask("read", read, pure=True), *sleepers(host, train=7, step=2)]
    result = profiled(ONE_THREAD, noisy, pipelined=False)
    assert result.step.spread_s > result.exposed_s["read"] > 0.4 * 9e-3
    assert {advice.plan for advice in result.advice} == {None}


def test_the_order_of_a_pipeline_does_not_bind_the_serial_loop(host: TimedHost) -> None:
    """Within a period the step may come before the next read; within an iteration, after it."""
    tasks = sleepers(host, read=6, train=7, step=2)
    plan = PipelinePlan(
        {"read": TaskSchedule(), "train": TaskSchedule(stage=1), "step": TaskSchedule(stage=1)},
        order=("step", "read"),
        **LOOP,
    )
    result = profiled(plan, tasks, pipelined=False)
    assert result.advice[0].task == "read"


def test_a_plan_that_is_too_large_to_simulate_has_no_advice(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is not lost."""
    monkeypatch.setattr("swpipe.planning.simulation.simulator.MOST_STEPS", 2)
    tasks = sleepers(host, read=6, train=7, step=2)
    result = profiled(ONE_THREAD, tasks, pipelined=False)
    assert result.advice == ()
    assert result.exposed_s["read"] == pytest.approx(6e-3)


def test_why_a_task_is_not_moved_is_said_in_short(host: TimedHost) -> None:
    """It has no chain of iterations, and no list of a dozen tasks."""
    names = [f"part{k}" for k in range(9)]
    tasks = sleepers(host, read=3, **dict.fromkeys(names, 2), step=9)
    order = [task.name for task in tasks]
    plan = PipelinePlan(
        {name: TaskSchedule() for name in order},
        deps=list(zip(order[1:], order, strict=False)),
        cross_iter_deps=[("read", "step")],
        order=order,
    )
    result = profiled(plan, tasks, pipelined=True)
    assert result.advice
    for advice in result.advice:
        assert "->" not in advice.text
        assert "order contradicts" not in advice.text
        assert advice.text.count("part") <= 8


def test_more_iterations_in_flight_are_advised_before_more_threads(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread that reads would save only a little more than a third iteration in flight."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)

    def read(ctx: IterContext) -> None:
        host.sleep(22.7e-3 if ctx.batch % 2 else 2e-3)

    tasks = [PipelineTask("read", read, pure=True), *sleepers(host, train=12)]
    schedule = {"read": TaskSchedule(thread_group="io"), "train": TaskSchedule(stage=1)}
    about: dict[str, Any] = {"deps": [("train", "read")], "cross_iter_deps": [("train", "train")]}
    plan = PipelinePlan(schedule, **about)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile_loop(range(8), num_rounds=2, pipelined=True)
    first = result.advice[0]
    assert first.change == "have up to 3 iterations in flight"
    assert first.plan == replace(plan, pipeline_depth=3)
    two_threads = schedule | {"read": TaskSchedule(thread_group="io", workers=2)}
    intervals_us = [
        simulate(each, result.costs, streams=False).ii_us
        for each in (plan, first.plan, PipelinePlan(two_threads, **about))
    ]
    assert intervals_us == pytest.approx([17350, 12350, 12000])


def test_limits_for_several_workers_admit_the_plan_that_was_found(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of the caller's thread that a pair of a period keeps in two stages are not frozen.

    Both once were, which no plan keeps: the bound of such limits was infinite.
    """
    frozen: list[tuple[str, ...]] = []

    def planned(*given: Any, limits: Limits, **about: Any) -> Any:
        frozen.append(limits.frozen)
        return auto_plan(*given, limits=limits, **about)

    monkeypatch.setattr("swpipe.profiler.advice.auto_plan", planned)
    tasks = sleepers(host, read=6, cache=2, train=7)
    schedule = {name: TaskSchedule(stage) for stage, name in enumerate(("read", "cache", "train"))}
    plan = PipelinePlan(
        schedule,
        deps=[("cache", "read"), ("train", "cache")],
        cross_iter_deps=[("train", "train"), ("cache", "train", 2)],
        same_period_deps=[("train", "cache")],
    )
    result = profiled(plan, tasks, pipelined=True)
    assert len(frozen) > 1
    assert all(not {"cache", "train"} <= {*names} for names in frozen)
    assert all("freeze" not in advice.not_moved for advice in result.advice)


def test_a_loader_is_a_row_and_its_thread_is_advised(host: TimedHost) -> None:
    """Serially it costs its own time; on a separate thread nothing, as was promised."""
    tasks = sleepers(host, train=7, step=2)
    plan = PipelinePlan.serial(tasks)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe, loader=InTurn(host, 6, length=5)).profile(None)
    assert tuple(result.measured) == ("<pull>", "train", "step")
    assert result.baseline_s == pytest.approx(15e-3)
    assert result.exposed_s["<pull>"] == pytest.approx(6e-3)
    pulled = result.tasks["<pull>"].thread
    assert pulled.host_s == pulled.blocked_s == pytest.approx(6e-3)
    first = result.advice[0]
    assert first.change == ITS_THREAD
    assert first.saved_s == pytest.approx(6e-3)
    with SWPipeline(first.plan, tasks, device="cpu") as pipe:
        tried = TaskProfiler(pipe, loader=InTurn(host, 6, length=5)).profile(None, pipelined=True)
    assert tried.baseline_s == pytest.approx(9e-3)
    assert tried.exposed_s["<pull>"] == pytest.approx(0, abs=1e-6)
    assert tried.busy_s == pytest.approx({"default": 9e-3, "loader": 6e-3})
    assert all(advice.task != "<pull>" for advice in tried.advice)
