"""A report says what bounds a loop, what overlap can gain, and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import swpipe.profiler.rounds
from swpipe import IterContext, PipelinePlan, ProfileResult, TaskSchedule, report, task
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import simulate
from swpipe.profiler import Advice
from swpipe.profiler.figures import IterationTimes, Measurement
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.spread import Estimate
from swpipe.reporting import StepReport, measuring
from swpipe.reporting.account import account_of
from swpipe.tuning import autotuning
from tests.profiler import results
from tests.reporting.known_loops import tasks_of
from tests.reporting.loops import Batches, image_loop
from tests.support.budget import examples
from tests.support.virtual_clock import TimedHost

MS = 1e-3


def test_a_loop_that_waits_for_its_input(waiting: StepReport) -> None:
    """It has verdict, ceiling and next step; the first advice saves what it promises."""
    found = waiting
    assert found.verdict.bound == "input-bound"
    assert "decode" in found.verdict.why
    assert found.profile.baseline_s == pytest.approx(20 * MS)
    # Decoding alone takes 12 ms, on a thread of its own.
    assert found.ceiling.floor_s == pytest.approx(12 * MS)
    assert found.ceiling.share == pytest.approx(0.4)
    first = found.changes[0]
    assert found.next_step == "Run decode on a thread of its own, one iteration ahead."
    assert first.tried is not None
    assert first.tried.value_s == pytest.approx(first.advice.saved_s) == pytest.approx(8 * MS)
    assert first.kept
    assert first.advice.plan.schedule["train"].stage == 1
    assert found.measured.initiation_interval_s == pytest.approx(20 * MS)
    # Each part of a plain loop is what an iteration saves without the task.
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    for part in found.parts:
        assert part.seconds == pytest.approx(found.profile.exposed_s[part.task])


def test_a_report_on_a_step_of_100_ms_takes_a_minute_at_most(host: TimedHost) -> None:
    """With many tasks there are fewer rounds."""
    loop = tasks_of(host, {f"feed {number}": 8 for number in range(10)} | {"train": 20})
    found = report(loop, range(4))
    assert host.now_ns < 60e9
    assert found.profile.measurement.num_rounds == 3
    assert found.changes[0].kept


def test_on_a_busy_machine_a_report_ends_after_the_profile(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan is tried, since the result would not be reliable."""
    load = SimpleNamespace(others=lambda: OtherLoad(1.5, 2))
    monkeypatch.setattr(swpipe.profiler.rounds, "load_so_far", lambda **given: load)
    said: list[str] = []
    found = report(image_loop(host, decode=12, train=7), range(8), rounds=2, progress=said.append)
    assert found.cannot_tell
    assert found.changes == found.findings == ()
    assert said[-1] == "recording a timeline"
    assert "What to change" not in found.to_html()


def test_a_step_without_parts_has_nothing_to_make_faster(host: TimedHost) -> None:
    """Tasks that take no time that can be measured are no parts of the step."""
    found = report(image_loop(host, decode=0, train=0, log=0), range(8), rounds=2)
    assert found.parts == ()
    assert found.verdict.bound == "balanced"
    assert found.verdict.why == "It takes no time that could be measured."
    assert found.next_step == "Overlap can gain nothing more."


def test_a_plan_under_which_two_threads_are_busy_is_balanced(host: TimedHost) -> None:
    """All tasks are named, and have to do less; existing overlap is not promised again."""
    found = report(image_loop(host, decode=10, train=9, log=1), range(8), plan=AHEAD, rounds=2)
    assert found.verdict.bound == "balanced"
    assert "all have to do less" in found.verdict.why
    assert found.next_step.endswith("Make tasks of all of these faster: io, default.")
    assert found.profile.baseline_s == pytest.approx(10 * MS)
    assert not found.ceiling.is_worth_it
    assert [change for change in found.changes if change.advice.plan] == []


AHEAD = PipelinePlan(
    {
        "decode": TaskSchedule(0, thread_group="io"),
        "train": TaskSchedule(1),
        "log": TaskSchedule(1),
    },
    deps=[("train", "decode"), ("log", "train")],
)


def test_a_plan_that_saved_nothing_when_it_was_tried_is_not_the_next_step(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on two cores were promised 7 ms, lost 2, and were still told to use the plan."""
    monkeypatch.setattr(
        autotuning.Loop, "try_round", lambda loop, plans, *given: dict.fromkeys(plans, 20 * MS)
    )
    found = report(image_loop(host, decode=8, train=11), range(8), rounds=2)
    assert not found.changes[0].advice.plan
    assert found.next_step.startswith("Make ")
    assert [one for one in found.changes if one.advice.plan] == []
    first = "run decode on a thread of its own, one iteration ahead: saved 0.00 ms. Side by side"
    assert found.in_vain.startswith(first)
    assert f"tried in vain: {first}" in " ".join(str(found).split())


def test_why_no_plan_is_advised_is_said(host: TimedHost) -> None:
    """It says what moving other tasks might save, or what to declare."""
    found = report(image_loop(host, decode=1.5, train=17), range(8))
    assert [one for one in found.changes if one.advice.plan] == []
    assert found.why_no_plan == "Another plan might save 1.500 ± 1.800 ms, and may save nothing."
    assert f"no plan: {found.why_no_plan}" in " ".join(str(found).split())
    assert found.profile.measurement.num_rounds == 5
    assert "Another plan might save" in found.to_html()
    bound = report(image_loop(host, decode=1, train=17, log=8), range(8), rounds=2)
    assert bound.why_no_plan == (
        "'log' uses state 'log', which the loop's body may use as well: if it does not, declare "
        'the state by DeclaredIO(others="").'
    )
    silent = replace(found, changes=())
    assert silent.why_no_plan == "No change to the plan promises more than its uncertainty."
    assert "declare what more of the tasks use, or let autotune try plans" in silent.next_step


def test_the_calls_of_a_loader_are_input(host: TimedHost) -> None:
    """They count as much as a task that reads."""
    loader = Batches(host, ms=30)
    found = report(image_loop(host, decode=1, train=8), range(8), loader=loader, rounds=2)
    assert found.verdict.bound == "input-bound"
    assert found.verdict.shares["input"] == pytest.approx(31 / 40)
    assert found.parts[0].task == "loader"
    assert "loader on a thread of its own" in found.next_step
    # With its place and its fix: here, a loader that makes its batches between two steps.
    assert [one.place for one in found.findings if one.rule == "loader-in-process"] == ["loader"]


def test_a_report_leaves_the_state_as_it_was(host: TimedHost) -> None:
    """Weights are those from before: the measurements were a trial."""
    weight = torch.zeros(3, requires_grad=True)

    @task
    def train(ctx: IterContext) -> None:
        weight.sum().backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)

    report([*image_loop(host, decode=2, train=1)[:1], train], range(8), rounds=2)
    assert torch.equal(weight, torch.zeros(3))
    assert weight.grad is None


@examples("timelines", 25)
@given(st.lists(st.integers(1, 50), min_size=5, max_size=5), st.data())
def test_the_parts_of_any_plan_add_up(host_ms: list[int], data: st.DataObject) -> None:
    """This includes threads in parallel, with a path that changes from one to another."""
    names = ("read", "decode", "forward", "backward", "step")
    stages = data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5).map(sorted))
    groups = data.draw(st.lists(st.sampled_from(["io", "default"]), min_size=5, max_size=5))
    places = zip(names, stages, groups, strict=True)
    plan = PipelinePlan(
        {name: TaskSchedule(stage=stage, thread_group=group) for name, stage, group in places},
        deps=list(zip(names[1:], names, strict=False)),
        cross_iter_deps=[("step", "step", 1)],
    )
    host_s = {name: ms / 1e3 for name, ms in zip(names, host_ms, strict=True)}
    simulated = simulate(plan, CostModel({n: TaskCost(1e6 * s) for n, s in host_s.items()}))
    path = simulate(plan, profile_of(host_s).costs, iterations=24).trace().critical_path()
    profile = profile_of(host_s, step_s=simulated.ii_us / 1e6)
    parts = account_of(profile, path, plan, streams=False).parts
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert sum(part.seconds for part in parts) == pytest.approx(simulated.ii_us / 1e6)
    assert {part.cause for part in parts if part.task == "read"} <= {"input"}


def profile_of(host_s: dict[str, float], step_s: float = 1.0) -> ProfileResult:
    """Return a profile of tasks that compute all the time."""
    return ProfileResult(
        batch="batch 0",
        mode="serial",
        iteration=IterationTimes(Estimate(step_s, 0.0), step_s),
        tasks=results.tasks_of(raw_s=host_s, host_s=host_s),
        measurement=Measurement(num_warmup=2, num_measure=3, num_rounds=4),
    )


def test_what_the_iterations_in_flight_hold_is_told(host: TimedHost, waiting: StepReport) -> None:
    """It is in the text and on the page, for the plan of the loop."""
    tasks, batches = image_loop(host, decode=12, train=7), [torch.zeros(1024)] * 8
    ahead = report(tasks, batches, plan=AHEAD, rounds=2)
    assert ahead.memory is not None
    assert ahead.memory.bytes == 2 * 4096
    assert "\nmemory: at most 8 KiB in 2 iterations; " in str(ahead)
    assert "At most 8 KiB in 2 iterations; " in ahead.to_html()
    assert waiting.memory is None


def test_the_text_has_what_the_page_begins_with(waiting: StepReport) -> None:
    """It has verdict, step, ceiling, next step, and the result of its promise."""
    lines = str(waiting).splitlines()
    assert lines[0].startswith("input-bound. For 60% of its time it waits for its input: decode.")
    assert lines[1] == "step: 20.0 ms"
    assert lines[2].startswith("ceiling: any overlap can save 8.00 ms at most (40%); then")
    assert lines[4] == "next step: Run decode on a thread of its own, one iteration ahead."
    assert lines[5].endswith("when it was tried, it saved 8.00 ms")
    assert max(map(len, lines)) <= 80  # of a terminal


@pytest.fixture
def promises_ms(
    waiting: StepReport, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float, list[float]], list[float]]:
    """Return what a report promises of a plan and of a shorter task, which cost 9 and 7 ms."""

    def promised(ceiling_ms: float, saved_ms: list[float]) -> list[float]:
        rounds = iter(saved_ms)
        monkeypatch.setattr(autotuning.Loop, "try_round", lambda *given: {
            measuring.NOW: 20 * MS, measuring.THEN: (20 - next(rounds)) * MS
        })  # fmt: skip
        plan = Advice("move", "decode", Estimate(9 * MS, MS), plan=AHEAD)
        half = Advice("halve", "log", Estimate(7 * MS, 0))
        profile = replace(waiting.profile, advice=(plan, half))
        floor_s = waiting.ceiling.step.value_s - ceiling_ms * MS
        ceiling = replace(waiting.ceiling, floor_s=floor_s)
        loop = autotuning.Loop(image_loop(TimedHost(), decode=12, train=7), range(8), "cpu")
        page = replace(waiting, plan=AHEAD, profile=profile, ceiling=ceiling)
        page = measuring._with_trial(page, loop, len(saved_ms))
        assert page.in_vain == ""
        return [each.advice.saved_s / MS for each in page.changes]

    return promised


def test_no_promise_of_a_plan_is_above_the_ceiling(
    promises_ms: Callable[[float, list[float]], list[float]],
) -> None:
    """Any prediction is cut; advice that needs another program may save more."""
    assert promises_ms(4, [6, 6, 6]) == pytest.approx([4, 7])


def test_no_promise_of_a_plan_is_above_its_trial(
    promises_ms: Callable[[float, list[float]], list[float]],
) -> None:
    """The upper end of the trial's interval limits it; a prediction within it stays."""
    assert promises_ms(20, [6, 6, 6]) == pytest.approx([6, 7])
    assert promises_ms(20, [6, 8, 10]) == pytest.approx([9, 7])
