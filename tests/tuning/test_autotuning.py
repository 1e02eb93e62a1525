"""The plan chosen by trial: the rule, the reasons, and the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swpipe
from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import Effects, Location
from swpipe.errors import PlanError
from swpipe.inference import Recording
from swpipe.planning import Limits
from swpipe.planning.simulation.simulator import peak_of
from swpipe.profiler.other_load import OtherLoad
from swpipe.tuning import autotuning
from swpipe.tuning.autotuning import PLANNED, PLANNED_AGAIN, Loop, autotune, tune
from swpipe.tuning.budget import Budget, Window
from swpipe.tuning.tried_plans import Candidate, choose, explain


def read(ctx: IterContext) -> None:
    """Set what ``train`` uses."""
    ctx.x = ctx.batch + 1


def train(ctx: IterContext) -> None:
    """Use what ``read`` sets."""
    ctx.y = ctx.x * 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure and plan with little effort, which suffices for two tasks."""
    monkeypatch.setattr(autotuning, "EFFORT", 0.1)
    monkeypatch.setattr(autotuning, "_WINDOWS", 1)


TASKS = (PipelineTask("read", read, pure=True), PipelineTask("train", train, pure=True))
BATCHES = [torch.ones(2), torch.zeros(2)]
SERIAL = replace(PipelinePlan.serial(TASKS), tasks=())
PREFETCH = PipelinePlan(
    {"read": TaskSchedule(thread_group="io"), "train": TaskSchedule(stage=1)},
    deps=[("train", "read")],
    pipeline_depth=3,
)
UNSAFE = replace(PREFETCH, deps=())
TWO_READERS = replace(
    PREFETCH, schedule={**PREFETCH.schedule, "read": TaskSchedule(thread_group="io", workers=2)}
)
COSTS = CostModel({"read": TaskCost(host_us=3000), "train": TaskCost(host_us=2000)})


def tried(name: str, *rounds_ms: float, plan: PipelinePlan = SERIAL, **fields: Any) -> Candidate:
    """Return a candidate with the measurements of a trial."""
    return Candidate(
        name,
        plan,
        fields.pop("predicted_us", 1e3 * rounds_ms[0]),
        rounds_us=tuple(1e3 * ms for ms in rounds_ms),
        **fields,
    )


def fake_trial(
    monkeypatch: pytest.MonkeyPatch, planned_ms: float = 6.0, **ready_made_ms: float
) -> list[tuple[str, ...]]:
    """Replace the trial by these times, and return the plans of each round."""
    took_ms = {"serial": 10.0, **ready_made_ms, PLANNED: planned_ms, PLANNED_AGAIN: planned_ms}
    rounds: list[tuple[str, ...]] = []

    def took_s(loop: Loop, plans: Any, *given: Any) -> dict[str, float]:
        rounds.append(tuple(plans))
        return {name: took_ms[name] / 1e3 for name in plans}

    monkeypatch.setattr(Loop, "_time", took_s)
    monkeypatch.setattr(autotuning, "load_so_far", lambda **given: None)
    monkeypatch.setattr(
        Loop, "measure", lambda loop, plan, until=1.0: replace(COSTS, memory=loop.memory)
    )
    return rounds


# ---------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("rounds_ms", "chosen"),
    [
        ({"serial": (10, 10, 10), "ready": (8, 8, 8), "planned": (6, 6, 6)}, "planned"),
        ({"serial": (10, 10, 10), "ready": (8, 8.2, 8.4), "planned": (8, 8, 8)}, "ready"),
        ({"serial": (9, 10, 11), "ready": (9.5, 9.5, 9.5), "planned": (9.2, 9.2, 9.2)}, "serial"),
        ({"serial": (10, 10, 10), "ready": (10.1, 10.1, 10.1), "planned": (8, 11, 14)}, "serial"),
        ({"serial": (10, 10, 10), "ready": (12, 12, 12), "planned": (9, 9, 9)}, "planned"),
        ({"serial": (10, 20, 30), "planned": (9, 19, 29)}, "serial"),
        ({"serial": (10, 11), "planned": (8, 10)}, "serial"),
    ],
    ids=[
        *("gain", "ready-made-within-spread", "noisy-serial", "noisy-planned", "ready-made-slower"),
        *("less-than-rounds-differ", "too-few-rounds"),
    ],
)
def test_a_simpler_plan_is_left_only_for_a_gain_above_the_spread(
    rounds_ms: dict[str, Sequence[float]], chosen: str
) -> None:
    """The order is serial, ready-made, planned; within the spread the first one wins."""
    candidates = [tried(name, *rounds) for name, rounds in rounds_ms.items()]
    assert choose(candidates).name == chosen
    trial = tried("serial", 9.0, 12.0, 10.0)
    assert (trial.interval_us, trial.spread_us) == (10e3, 1.5e3)


# ------------------------------------------------------------------------------------- the reasons


def test_the_choice_is_explained() -> None:
    """It follows the planner's own reasons; a faster plan within the spread is named."""
    serial, ready = tried("serial", 10.0), tried("ready", 8.0, 8.4, why=("Because.",))
    faster = tried("planned", 7.9, 8.3)
    why = explain([serial, ready, faster], ready, COSTS)
    assert why == (
        "Because.",
        "It takes 18.0% less time per iteration than the serial plan.",
        "planned is not faster by more than the spread, and less simple.",
    )
    (alone,) = explain([serial, tried("planned", 10.1)], serial, COSTS)
    assert alone == "No plan is faster than the serial one by more than the spread of the trial."


@pytest.mark.parametrize(
    ("predicted_us", "trusted"), [(9_000, True), (8_900, False), (11_100, False), (10_900, True)]
)
def test_a_prediction_that_is_off_is_not_to_be_trusted(predicted_us: float, trusted: bool) -> None:
    """It is off by more than 10% and by more than the spread."""
    serial = tried("serial", 10.0, predicted_us=predicted_us)
    why = explain([serial], serial, COSTS)
    assert any(sentence.startswith("Do not trust the prediction: ") for sentence in why) != trusted
    noisy = tried("serial", 8.0, 10.0, 12.0, predicted_us=predicted_us)
    assert "trust" not in " ".join(explain([noisy], noisy, COSTS))


@pytest.mark.parametrize(("gil_us", "binds"), [(9_500, True), (8_000, False)])
def test_processes_are_advised_where_the_interpreter_lock_limits(
    gil_us: float, binds: bool
) -> None:
    """Tasks hold it for more than 90% of the interval; the one that holds it longest is named."""
    costs = CostModel({"read": TaskCost(host_us=gil_us, gil_us=gil_us), "train": TaskCost()})
    serial = tried("serial", 10.0)
    text = " ".join(explain([serial], serial, costs))
    assert ("use processes (DataLoader workers)" in text) == binds
    assert ("read the longest" in text) == binds


# ------------------------------------------------------------------------------------- the steps


def test_serial_ready_made_and_planned_plans_are_tried_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simplest comes first, in an alternating order; the result has a row for each."""
    took = ("serial", "prefetch", PLANNED, PLANNED_AGAIN)
    rounds = fake_trial(monkeypatch, prefetch=8.0)
    steps: list[str] = []
    loop = Loop(TASKS, BATCHES, "cpu", progress=steps.append)
    tuned = tune(loop, Limits(), {"prefetch": PREFETCH})
    assert [candidate.name for candidate in tuned.candidates] == list(took)
    assert rounds[0] == took
    assert rounds[1] == tuple(reversed(took))
    assert len(rounds) == 5
    assert tuned.chosen.name == PLANNED
    assert len(tuned.plan.thread_groups) == 2
    assert tuned.plan.deps == (("train", "read"),)
    assert tuned.chosen.interval_us == pytest.approx(6000)
    assert [step.split()[0] for step in steps] == ["recording", "measuring", "trying"]
    text = tuned.format()
    assert text.startswith("6.000 ms per iteration, ")
    assert all(f"\n{name} " in text for name in took)


@pytest.mark.parametrize(
    ("plan", "limits", "reason"),
    [
        (UNSAFE, Limits(), "it could give other numbers than the serial loop"),
        (PREFETCH, Limits(groups=1), "it is above the limits"),
        (TWO_READERS, Limits(workers=1), "it is above the limits"),
        (PREFETCH, Limits(frozen=["train"]), "the limits freeze tasks"),
    ],
)
def test_a_ready_made_plan_that_may_not_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, plan: PipelinePlan, limits: Limits, reason: str
) -> None:
    """The reasons name it."""
    fake_trial(monkeypatch, planned_ms=10.0)
    tuned = autotune(TASKS, BATCHES, device="cpu", limits=limits, ready_made={"prefetch": plan})
    assert f"The ready-made plan prefetch was not tried: {reason}." in tuned.why


def test_threads_get_one_more_iteration_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """This respects the limit, and has a reason; one thread needs none."""
    fake_trial(monkeypatch)
    tuned = autotune(TASKS, BATCHES, device="cpu")
    # Two workers read, for which three iterations in flight are needed.
    assert (tuned.plan.most_workers, tuned.plan.depth) == (2, 4)
    assert any("evens out" in sentence for sentence in tuned.why)
    limited = autotune(TASKS, BATCHES, device="cpu", limits=Limits(in_flight=2))
    assert limited.plan.depth == 2
    alone = autotune(TASKS, BATCHES, device="cpu", limits=Limits(groups=1))
    assert not any("evens out" in sentence for sentence in alone.why)


def test_a_limit_to_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and ready-made plans keep it; neither depth nor a thread is added beyond it."""
    fake_trial(monkeypatch, prefetch=6.0)
    one = Limits(workers=1)
    free = autotune(TASKS, BATCHES, device="cpu", limits=one, ready_made={"prefetch": PREFETCH})
    assert free.plan == PREFETCH  # it is as fast as the planned ones
    held = {each.name: peak(each.plan, free.costs) for each in free.candidates}
    assert held["serial"] < held["prefetch"]
    limits = replace(one, max_bytes=held["serial"])
    limited = autotune(
        TASKS, BATCHES, device="cpu", ready_made={"prefetch": PREFETCH}, limits=limits
    )
    reason = "it holds more than max_bytes"
    assert f"The ready-made plan prefetch was not tried: {reason}." in limited.why
    assert limited.plan.depth == 1
    assert {peak(each.plan, limited.costs) for each in limited.candidates} == {held["serial"]}
    planned = free.candidates[-1].plan
    assert planned.depth == 3
    two = peak(replace(planned, pipeline_depth=2), free.costs)
    assert held["serial"] < two < held[PLANNED]
    limits = replace(one, max_bytes=two)
    assert autotune(TASKS, BATCHES, device="cpu", limits=limits).plan.depth == 2


def peak(plan: PipelinePlan, costs: CostModel) -> int:
    """Return the bytes that a plan holds."""
    held = peak_of(plan, costs, streams=False)
    assert held is not None
    return held.bytes


def test_a_loop_is_tuned_without_a_fake() -> None:
    """It is recorded, measured, planned and tried; any chosen plan gives the serial numbers."""
    tuned = autotune(TASKS, BATCHES, device="cpu")
    assert tuned.candidates[0].name == "serial"
    assert all(len(candidate.rounds_us) == 5 for candidate in tuned.candidates)
    with swpipe.SWPipeline(tuned.plan, TASKS, device="cpu") as pipe:
        outputs = [ctx.y for ctx in pipe.iterate(BATCHES)]
    assert [y.tolist() for y in outputs] == [[4.0, 4.0], [2.0, 2.0]]


def test_what_cannot_be_tuned_is_refused() -> None:
    """These are no batches, no time, an unknown frozen task; nothing is recorded before."""
    with pytest.raises(ValueError, match="seconds is 0: give a number greater than 0"):
        tune(Loop(TASKS, BATCHES, "cpu", progress=pytest.fail), Limits(), {}, 0)
    with pytest.raises(ValueError, match="give at least one batch"):
        autotune(TASKS, [], device="cpu")
    with pytest.raises(PlanError, match="'gone'"):
        autotune(TASKS, BATCHES, device="cpu", limits=Limits(frozen=["gone"]))


# ------------------------------------------------------------------------------------ the loader


class Loader:
    """A loader whose batches a task may make larger."""

    level = 1.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch * self.level for batch in BATCHES)


def test_a_slow_loader_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner finds that faster; it counts in each measurement and trial."""
    fake_trial(monkeypatch)
    costs = CostModel({**COSTS.tasks, "<pull>": TaskCost(host_us=3000)})
    monkeypatch.setattr(Loop, "measure", lambda loop, plan, until=1.0: costs)
    limits = Limits(frozen=["train"])
    tuned = autotune(TASKS, BATCHES, device="cpu", limits=limits, loader=[1, 2])
    assert tuned.plan.pull_group == "loader"
    assert tuned.recording.effects["<pull>"] == Effects()
    assert any("pulled on a thread of their own" in sentence for sentence in tuned.why)
    assert list(tuned.recording.effects) == ["<pull>", "read", "train", "<body>"]


def test_a_loader_of_which_nothing_is_known_is_not_pulled_ahead() -> None:
    """It may read what the body changes; the reasons say so, and the costs have its calls."""
    tuned = autotune(TASKS, BATCHES, device="cpu", loader=Loader())
    assert {candidate.plan.depth for candidate in tuned.candidates} == {1}
    assert any("the effects of the loader are not declared" in one for one in tuned.why)
    assert tuned.costs.tasks["<pull>"].host_us > 0


def test_of_tasks_that_say_nothing_none_overlaps() -> None:
    """The reasons name them, and what to say."""
    tasks = [replace(task, pure=False) for task in TASKS]
    tuned = autotune(tasks, BATCHES, device="cpu")
    assert {candidate.plan.depth for candidate in tuned.candidates} == {1}
    assert any("read, train stay with the loop's body" in one for one in tuned.why)


# ----------------------------------------------------------------------- time, and a busy machine


class Clock:
    """A clock that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("swpipe.tuning.budget.time.monotonic", lambda: self.now_s)

    def take(self, seconds: float) -> Any:
        """Return a function that takes time per iteration of a window, and returns ``COSTS``."""

        def run(pipe: Any, batches: Any, warmup: int, measure: int, **options: Any) -> CostModel:
            self.now_s += 3 * seconds * (warmup + measure)
            return COSTS

        return run


@pytest.mark.parametrize(("seconds", "rounds"), [(None, 5), (35, 3), (0.5, 2)])
def test_a_trial_has_as_many_rounds_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, rounds: int
) -> None:
    """Rounds take ten seconds: there are two to five; a note says if it took longer."""
    seen = fake_trial(monkeypatch)
    clock, trial = Clock(monkeypatch), Loop._time

    def slow_trial(*given: Any) -> dict[str, float]:
        clock.now_s += 10
        return trial(*given)

    monkeypatch.setattr(Loop, "_time", slow_trial)
    tuned = autotune(TASKS, BATCHES, device="cpu", seconds=seconds)
    assert len(seen) == rounds
    late = [sentence for sentence in tuned.why if "more than the 0.5 s" in sentence]
    assert len(late) == (seconds == 0.5)


def test_long_iterations_leave_time_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window has one at least; in half of the time, measured plans are not measured again."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(autotuning, "_WINDOWS", 3)
    monkeypatch.setattr(autotuning, "measure_costs", clock.take(1.0))
    loop = replace(Loop(TASKS, BATCHES, "cpu"), budget=Budget(100))
    with loop.budget.spending(2):
        clock.now_s += 2
    assert loop.budget.window(6, 0.3) == Window(1, 3)
    loop.measure(SERIAL, 0.3)
    assert clock.now_s == 2 + 3 * 9
    loop.measure(SERIAL, 0.3)  # no time is left: the least
    assert clock.now_s == 29 + 3 * 2
    assert not loop.budget.allows(0, 0.3)
    assert Budget().window(6, 0.3) == Window(3, 10)


def test_tuning_that_took_more_than_a_tenth_longer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how long an iteration takes."""
    clock, budget = Clock(monkeypatch), Budget(100)
    clock.now_s += 110
    assert budget.outcome() == ()
    clock.now_s += 1
    assert "took 111 s, more than the 100 s that it was given" in budget.outcome()[0]


def test_ranks_have_as_many_iterations_as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run collectives, so that the local clock does not count."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("swpipe.tuning.budget.gather", lambda own: [4.0, own])
    budget = Budget(100)
    with budget.spending(1):
        clock.now_s += 1000
    assert budget.window(1, 1.0) == Window(1, 3)
    assert budget.allows(10)


def test_each_step_is_a_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in order; only the caller gets the result."""
    fake_trial(monkeypatch)
    autotune(TASKS, BATCHES, device="cpu")
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "autotune: recording what the tasks touch",
        "autotune: measuring what the tasks hold",
        "autotune: trying serial, planned, planned from costs under the plan",
    ]
    assert printed.out == ""


def test_a_busy_machine_is_told_before_measuring_and_before_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurements need not hold elsewhere; an idle machine has no message."""
    fake_trial(monkeypatch)
    for used, told in ((1.5, True), (0.1, False)):
        load = SimpleNamespace(others=partial(OtherLoad, used, 2))
        monkeypatch.setattr(autotuning, "load_so_far", lambda load=load, **given: load)
        steps: list[str] = []
        tuned = tune(Loop(TASKS, BATCHES, "cpu", progress=steps.append), Limits(), {})
        assert any("the machine is busy" in step for step in steps[:2]) is told
        assert tuned.format().startswith("the machine is busy: other processes use 1.5") is told


# ---------------------------------------------------------------------------------- several ranks


def test_a_round_takes_as_long_as_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that is best here keeps another rank waiting."""
    fake_trial(monkeypatch, one=10.0, two=12.0)
    there = {"one": 0.015, "two": 0.011}
    candidates = [tried("one", 1.0), tried("two", 1.0)]
    loop = Loop(TASKS, BATCHES, "cpu")
    assert choose(autotuning._try(loop, candidates)).name == "one"
    monkeypatch.setattr(autotuning, "gather", lambda own: [own, there])
    both = autotuning._try(loop, candidates)
    assert [candidate.interval_us for candidate in both] == pytest.approx([15e3, 12e3])
    assert choose(both).name == "two"


def test_what_tasks_touch_on_any_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they share ctx.x; on another rank they also share a table."""
    place = Location("table", persistent=True)

    def ranks(own: Recording) -> list[Recording]:
        there = {
            "read": Effects(reads=frozenset({place})),
            "train": Effects(writes=frozenset({place})),
        }
        return [own, replace(own, effects={**own.effects, **there})]

    loop = Loop(TASKS, BATCHES, "cpu")
    assert loop.inferred_plan(loop.record()).cross_iter_deps == ()
    monkeypatch.setattr(autotuning, "gather", ranks)
    recording = loop.record()
    assert ("read", "train", 1) in loop.inferred_plan(recording).cross_iter_deps
    assert recording.tasks == TASKS


def test_tasks_that_are_known_to_communicate_are_globally_ordered() -> None:
    """The recording shows none; the plan contains no tasks, so that it can be sent."""
    schedule = {**SERIAL.schedule, "train": TaskSchedule(globally_ordered=True)}
    loop = Loop(TASKS, BATCHES, "cpu", replace(SERIAL, schedule=schedule))
    plan = loop.inferred_plan(loop.record())
    assert [entry.globally_ordered for entry in plan.schedule.values()] == [False, True]
    assert plan.tasks == ()


def test_a_task_costs_its_mean_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a late rank does not count on top of what that rank was doing."""
    slow = CostModel({task.name: TaskCost(host_us=1e6) for task in TASKS})
    monkeypatch.setattr(autotuning, "gather", lambda own: [own, slow])
    costs = Loop(TASKS, BATCHES, "cpu").measure(SERIAL)
    assert all(5e5 < cost.host_us < 9e5 for cost in costs.tasks.values())


def test_all_ranks_use_the_plan_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own plan might be another one."""
    fake_trial(monkeypatch)

    def ranks(own: Any) -> list[Any]:
        return [replace(own, plan=PREFETCH), own] if isinstance(own, Candidate) else [own]

    monkeypatch.setattr(autotuning, "gather", ranks)
    assert tune(Loop(TASKS, BATCHES, "cpu"), Limits(), {}).plan == PREFETCH


def test_a_slow_task_is_tried_on_no_more_workers_than_cores_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting gains by all workers; computation is as fast on as many as there are cores."""
    monkeypatch.setattr(autotuning, "cores", lambda: 2)
    slow = CostModel({"read": TaskCost(host_us=40_000), "train": TaskCost(host_us=10_000)})
    on_cores = f"{PLANNED}, 2 workers"
    for on_two_ms, workers in ((20.0, 4), (6.0, 2)):
        rounds = fake_trial(monkeypatch, 6.0, **{on_cores: on_two_ms})
        monkeypatch.setattr(
            Loop, "measure", lambda loop, plan, until=1.0: replace(slow, memory=loop.memory)
        )
        tuned = autotune((TASKS[0], PipelineTask("train", train)), BATCHES, device="cpu")
        assert rounds[0] == ("serial", on_cores, PLANNED, PLANNED_AGAIN)
        assert tuned.plan.schedule["read"].workers == workers
        assert f"{tuned.plan.threads} threads" in tuned.format()


def test_a_trial_goes_through_batches_from_all_over_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All plans of a turn use the same successive ones; a window is no shorter than ten."""
    tried: list[list[int]] = []

    def took_s(loop: Loop, plans: Any, batches: Any, *given: Any) -> dict[str, float]:
        tried.append([*batches])
        return dict.fromkeys(plans, 1.0)

    monkeypatch.setattr(Loop, "_time", took_s)
    loop = Loop(TASKS, range(1000), "cpu")
    for turn in range(4):
        loop.try_round({"serial": SERIAL}, turn, loop.through(20))
    assert [len(batches) for batches in tried] == [20] * 4
    assert max(map(max, tried)) - min(map(min, tried)) > 500
    assert loop.through() == Window(3, 48)
    assert Loop(TASKS, range(3), "cpu").through() == Window(3, 10)


def test_a_trial_has_whole_passes_of_a_loader() -> None:
    """The batches in them are equally frequent."""
    loop = Loop(TASKS, range(40), "cpu", loader=range(48))
    window = loop.through()
    assert window == Window(3, 48)
    assert loop._cycle(window) == 24
