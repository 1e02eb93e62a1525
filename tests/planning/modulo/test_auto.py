"""The planner: what it keeps, what it promises, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.analysis.verification import verify
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import Effects, EffectTable, Location, undeclared_effects
from swpipe.core.plan import PULL
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import Choice, Limits, auto_plan, lower_bounds, simulate
from tests.planning.instances import Instance, instance

EFFORT = 0.2
"""A short search: the tests hold for any plan."""


def planned(given: Instance) -> Choice:
    """Return the planner's choice after a short search."""
    return auto_plan(
        given.plan, given.costs, limits=given.limits, streams=given.streams, effort=EFFORT
    )


def loop(**changes: object) -> PipelinePlan:
    """Return a plan of "read" and then "work"."""
    schedule = {"read": TaskSchedule(), "work": TaskSchedule()}
    given = {"schedule": schedule, "deps": [("work", "read")], **changes}
    return PipelinePlan(**given)  # type: ignore[arg-type]


COSTS = CostModel({"read": TaskCost(host_us=400), "work": TaskCost(host_us=600)})


@pytest.mark.parametrize("number", range(8))
def test_a_plan_has_its_interval_and_keeps_what_is_not_the_planners(number: int) -> None:
    """The simulator gives the interval, which is not below the bound.

    Dependences, streams and global order are those of the given plan; limits are kept.
    """
    given = instance(number, tight=number % 3 == 0)
    choice = planned(given)
    plan = choice.plan
    validate(plan)
    assert simulate(plan, given.costs, streams=given.streams).ii_us == choice.ii_us
    assert choice.ii_us >= choice.bounds.ii_us * (1 - 1e-12)
    assert choice.why[0].startswith("The predicted interval is optimal by these costs: ") == (
        choice.gap < 1e-6
    )
    assert (plan.deps, plan.cross_iter_deps) == (given.plan.deps, given.plan.cross_iter_deps)
    for name, entry in plan.schedule.items():
        before = given.plan.schedule[name]
        assert (entry.stream, entry.globally_ordered) == (before.stream, before.globally_ordered)
    assert choice.in_flight == plan.depth <= given.limits.in_flight
    assert choice.threads == len(plan.thread_groups) <= given.limits.groups
    for name in given.limits.frozen:
        entry = plan.schedule[name]
        assert (entry.stage, entry.thread_group) == (plan.max_stage, "default")
    if number == 1:  # no clock is read, and the random numbers have a seed
        assert planned(given) == choice


def test_no_plan_of_a_small_loop_is_shorter() -> None:
    """A constraint solver says so; 39 keeps the recurrence or the threads, but not both."""
    best_us = {1: 13_900, 3: 16_300, 7: 49_800, 13: 34_100, 39: 17_450}
    assert {n: planned(instance(n, size=6)).ii_us for n in best_us} == best_us


@pytest.mark.parametrize(("slack", "threads", "ii_us"), [(0.3, 2, 600), (0.34, 1, 800)])
def test_fewer_threads_are_taken_within_the_slack(slack: float, threads: int, ii_us: float) -> None:
    """Two short tasks with a long one take a third longer on one thread."""
    plan = PipelinePlan(dict.fromkeys(("a", "b", "c"), TaskSchedule()))
    costs = CostModel({"a": TaskCost(100), "b": TaskCost(100), "c": TaskCost(600)})
    choice = auto_plan(plan, costs, streams=False, slack=slack)
    assert (choice.threads, choice.ii_us) == (threads, ii_us)


def test_run_ahead_stays_as_it_is() -> None:
    """With one iteration in flight, three streams overlap as far as the plan lets the host run."""
    names = ["copy", "dist", "work"]
    plan = PipelinePlan(
        {name: TaskSchedule(stream=name) for name in names},
        deps=[("dist", "copy"), ("work", "dist")],
    )
    costs = CostModel({name: TaskCost(device_us=600) for name in names})
    for run_ahead, ii_us in ((None, 900), (1, 900), (2, 600)):
        choice = auto_plan(replace(plan, run_ahead=run_ahead), costs, limits=Limits(in_flight=1))
        assert (choice.ii_us, choice.in_flight, choice.plan.run_ahead) == (ii_us, 1, run_ahead)
    deeper = auto_plan(plan, costs)
    assert (deeper.ii_us, deeper.in_flight, deeper.plan.run_ahead) == (600, 2, None)


def test_a_thread_and_an_iteration_in_flight_are_used_where_they_earn_something() -> None:
    """Two blocking tasks use two threads, and a reason says so; device work or a limit, one."""
    choice = auto_plan(loop(), COSTS, streams=False)
    assert (choice.ii_us, choice.in_flight, choice.threads) == (600, 2, 2)
    earned = "Thread 2 earns 0.400 ms: without it no plan of this depth is below 1.000 ms."
    assert earned in choice.why
    assert choice.format().startswith("0.600 ms per iteration, 2 iterations in flight, 2 threads")
    schedule = {"read": TaskSchedule(stream="copies"), "work": TaskSchedule()}
    costs = CostModel({"read": TaskCost(device_us=400), "work": TaskCost(device_us=600)})
    choice = auto_plan(loop(schedule=schedule), costs, limits=Limits(groups=4))
    assert (choice.ii_us, choice.in_flight, choice.threads) == (600, 1, 1)
    assert "The caller's thread is enough for the tasks." in choice.why
    choice = auto_plan(loop(), COSTS, limits=Limits(groups=1), streams=False)
    assert (choice.ii_us, choice.in_flight, choice.threads) == (1_000, 1, 1)


def test_what_is_undeclared_stays_with_the_body() -> None:
    """The others may move; an undeclared loader takes turns with the body."""

    def choice_of(costs: CostModel, effects: tuple[Effects, ...], *, body: bool = True) -> Choice:
        table = dict(zip((PULL, "read", "work"), effects, strict=True))
        given = {"streams": False, "effort": 0.01}
        return auto_plan(loop(), costs, effects=table, body=body, **given)  # type: ignore[arg-type]

    none = Effects()
    assert choice_of(COSTS, (none, none, undeclared_effects())).ii_us == 600
    choice = choice_of(COSTS, (none, undeclared_effects(), none))
    entry = choice.plan.schedule["read"]
    assert (entry.stage, entry.thread_group) == (choice.plan.max_stage, "default")
    assert choice.why[-1].startswith("read stays with the loop's body, because its effects are")
    pulled = CostModel({**COSTS.tasks, PULL: TaskCost(500)})
    assert choice_of(pulled, (none, none, none)).in_flight > 1
    # There is nobody whom it could be ahead of.
    assert choice_of(pulled, (undeclared_effects(), none, none), body=False).in_flight > 1
    for last, body in ((none, True), (undeclared_effects(), False)):
        choice = choice_of(pulled, (undeclared_effects(), none, last), body=body)
        assert (choice.plan.pull_group, choice.in_flight) == (None, 1)
        assert choice.why[-1].startswith("Batches are not pulled ahead")


def test_limits_that_admit_no_plan_say_which_binds() -> None:
    """A pair that reaches two iterations ahead needs three in flight."""
    schedule = {"read": TaskSchedule(), "work": TaskSchedule(stage=2)}
    reaching = loop(schedule=schedule, deps=(), same_period_deps=[("work", "read")])
    with pytest.raises(PlanError, match="limit of 2 iterations in flight.*set in_flight to 3"):
        auto_plan(reaching, COSTS, limits=Limits(in_flight=2), streams=False)
    choice = auto_plan(reaching, COSTS, limits=Limits(in_flight=3), streams=False)
    found = {name: entry.stage for name, entry in choice.plan.schedule.items()}
    assert found["work"] - found["read"] == 2
    assert all(dep.lag >= 0 for dep in resolve_plan(choice.plan).dependences)


def test_frozen_tasks_that_cannot_be_in_one_stage_are_refused() -> None:
    """If a pair reaches into a later iteration, their bound would be infinite."""
    schedule = {"read": TaskSchedule(), "work": TaskSchedule(stage=1)}
    reaching = loop(schedule=schedule, deps=(), same_period_deps=[("work", "read")])
    for frozen in (["read", "work"], ["read"]):
        with pytest.raises(PlanError, match=r"freeze .*but work must be later.*\(work aft"):
            auto_plan(reaching, COSTS, limits=Limits(frozen=frozen), streams=False)
    choice = auto_plan(reaching, COSTS, limits=Limits(frozen=["work"]), streams=False)
    assert choice.bounds.ii_us <= choice.ii_us


def test_effects_that_the_plan_would_not_keep_refuse_it() -> None:
    """The next iteration reads a state without a declared dependence."""
    state = Location("model", True)
    effects = {
        PULL: Effects(),
        "read": Effects(reads=frozenset({state})),
        "work": Effects(writes=frozenset({state})),
    }
    with pytest.raises(PlanError, match="model"):
        auto_plan(loop(), COSTS, streams=False, effects=effects, body=False)
    kept = loop(cross_iter_deps=[("read", "work")])
    for body in (True, False):
        choice = auto_plan(kept, COSTS, streams=False, effects=effects, body=body)
        assert choice.ii_us == 1_000


FROZEN = PipelinePlan(
    {name: TaskSchedule() for name in ("read", "train", "step")},
    deps=[("train", "read"), ("step", "train")],
    cross_iter_deps=[("train", "step")],
)


def with_pull(pull_us: float) -> CostModel:
    """Return costs of 1 ms to read, and 4 ms on the caller's thread."""
    tasks = {"read": 1_000.0, "train": 3_000.0, "step": 1_000.0, PULL: pull_us}
    return CostModel({name: TaskCost(us) for name, us in tasks.items()}, handover_us=20.0)


def test_a_slow_loader_earns_a_thread() -> None:
    """The caller's thread must have enough other work; the loader's thread counts as one."""
    limits = Limits(frozen=["train", "step"])
    found = auto_plan(FROZEN, with_pull(3_000), limits=limits, streams=False)
    assert found.plan.pull_group == "loader"
    assert found.ii_us == simulate(found.plan, with_pull(3_000), streams=False).ii_us < 4_100
    assert found.threads == len(found.plan.thread_groups) <= 3
    assert "Batches are pulled on a thread of their own, which earns" in found.why[-1]
    quick = auto_plan(FROZEN, with_pull(0), limits=limits, streams=False)
    assert quick.plan.pull_group is None


def test_a_thread_for_the_loader_is_within_the_limit() -> None:
    """With a limit of two it is one of the two; with a limit of one there is none."""
    for threads, group in ((2, "loader"), (1, None)):
        limits = Limits(groups=threads, frozen=["train", "step"])
        found = auto_plan(FROZEN, with_pull(3_000), limits=limits, streams=False)
        assert found.plan.pull_group == group
        assert len(found.plan.thread_groups) == found.threads <= threads
    mine = replace(FROZEN, pull_group="mine")
    for limits in (Limits(groups=1), Limits(in_flight=1)):
        with pytest.raises(PlanError, match="to 2 or more, or leave it out"):
            auto_plan(mine, with_pull(3_000), limits=limits, streams=False)


@pytest.mark.parametrize(("group", "in_flight"), [(None, 2), ("mine", 3), ("io", 2), ("io", 5)])
def test_a_plan_whose_loader_has_a_thread_can_run(group: str | None, in_flight: int) -> None:
    """It has room for the batch that is pulled ahead, within the limit, and a name."""
    schedule = {name: TaskSchedule(thread_group="io") for name in FROZEN.schedule}
    plan = replace(FROZEN, schedule=schedule, pull_group=group)
    limits = Limits(in_flight, frozen=["train", "step"])
    found = auto_plan(plan, with_pull(3_000), limits=limits, streams=False, effort=EFFORT)
    validate(found.plan)
    assert found.in_flight == found.plan.depth <= in_flight
    assert found.plan.pull_group == (group or "loader")
    assert found.plan.pull_group not in {e.thread_group for e in found.plan.schedule.values()}


@pytest.mark.parametrize("group", [None, "mine"])
def test_a_loader_that_takes_longest_bounds_the_interval(group: str | None) -> None:
    """This holds for any thread; with tasks on its thread it takes longer."""
    plan, costs = replace(FROZEN, pull_group=group), with_pull(9_000)
    alone = lower_bounds(plan, costs, streams=False, threads=3)
    assert alone.res_mii_us == 9_000
    assert "<pull>" in alone.busiest
    fixed = lower_bounds(plan, costs, streams=False)
    assert fixed.res_mii_us == (9_000 if group else 14_000)
    assert simulate(plan, costs, streams=False).ii_us >= fixed.res_mii_us


APART = {PULL: Effects(), "read": Effects(), "work": undeclared_effects()}
SLOW = CostModel({"read": TaskCost(host_us=40_000), "work": TaskCost(host_us=10_000)})


@pytest.mark.parametrize(
    ("limits", "workers", "ii_us", "bound_us"),
    [
        (Limits(), 4, 10_000, 10_000),
        (Limits(in_flight=8), 4, 10_000, 10_000),
        (Limits(in_flight=4), 3, 40_000 / 3, 50_000 / 4),
        (Limits(workers=2), 2, 20_000, 20_000),
        (Limits(groups=1), 1, 50_000, 50_000),
    ],
)
def test_a_task_that_is_too_slow_gets_as_many_workers_as_it_needs(
    limits: Limits, workers: int, ii_us: float, bound_us: float
) -> None:
    """A read of 40 ms before a step of 10 ms gets 4, within the limits; the reason says so."""
    choice = auto_plan(loop(), SLOW, streams=False, effects=APART, limits=limits)
    assert choice.plan.schedule["read"].workers == workers
    assert choice.ii_us == pytest.approx(ii_us)
    assert choice.bounds.ii_us == pytest.approx(bound_us)
    told = [sentence for sentence in choice.why if "take turns" in sentence]
    assert len(told) == (workers > 1)


def test_two_slow_tasks_share_a_group_of_workers() -> None:
    """Two reads of 40 ms before a step of 10 ms on two thread groups: 18 ms with 5 in flight."""
    names = ("read", "decode", "work")
    plan = PipelinePlan(
        schedule=dict.fromkeys(names, TaskSchedule()),
        deps=[("decode", "read"), ("work", "decode")],
    )
    costs = CostModel({**SLOW.tasks, "decode": TaskCost(host_us=40_000)})
    effects = {
        PULL: Effects(),
        "read": Effects(),
        "decode": Effects(),
        "work": undeclared_effects(),
    }
    choice = auto_plan(plan, costs, limits=Limits(groups=2), streams=False, effects=effects)
    assert choice.plan.workers(choice.plan.schedule["read"].thread_group) > 1
    assert choice.ii_us <= 20_000
    assert choice.bounds.ii_us == 18_000


@pytest.mark.parametrize("number", range(2))
def test_no_plan_with_workers_is_below_the_bound(number: int) -> None:
    """All groupings of three tasks with all numbers of workers within the limits are tried."""
    rng = random.Random(number)
    names = ("a", "b", "c")
    limits = Limits(groups=2, workers=3, in_flight=4)
    costs = CostModel({name: TaskCost(host_us=rng.randrange(1, 9) * 1_000) for name in names})
    state = frozenset([Location("state", True)])
    effects = {PULL: Effects(), **dict.fromkeys(names, Effects())}
    effects[rng.choice(names)] = Effects(state, state)
    plan = PipelinePlan(
        schedule=dict.fromkeys(names, TaskSchedule()), deps=[("b", "a"), ("c", "b")]
    )
    choice = auto_plan(plan, costs, limits=limits, streams=False, effects=effects, body=False)
    least_us = min(
        simulate(other, costs, streams=False).ii_us
        for other in plans_with_workers(plan, limits)
        if accepted(other, effects)
    )
    assert choice.bounds.ii_us <= least_us <= choice.ii_us


def plans_with_workers(plan: PipelinePlan, limits: Limits) -> Iterator[PipelinePlan]:
    """Yield all stages, groups and numbers of workers for three tasks."""
    for groups in product(("default", "io"), repeat=3):
        # A later task is never in an earlier stage than one that it depends on.
        for stages in combinations_with_replacement(range(3), 3):
            for workers in range(1, limits.workers + 1 if "io" in groups else 2):
                schedule = {
                    name: TaskSchedule(
                        stage=stage, thread_group=group, workers=workers if group == "io" else 1
                    )
                    for name, group, stage in zip(plan.schedule, groups, stages, strict=True)
                }
                with suppress(PlanError):
                    other = replace(plan, schedule=schedule)
                    if other.depth <= limits.in_flight:
                        yield other


def accepted(plan: PipelinePlan, effects: EffectTable) -> bool:
    """Return whether the verifier accepts a plan."""
    try:
        verify(plan, effects=effects, streams=False, body=False)
    except PlanError:
        return False
    return True


def test_only_tasks_that_may_run_beside_themselves_get_workers() -> None:
    """A task that changes a state does not, nor does an undeclared one."""
    log = frozenset([Location("log", True)])
    noting = {**APART, "read": Effects(log, log)}
    for effects in (noting, None):
        choice = auto_plan(loop(), SLOW, streams=False, effects=effects)
        assert choice.plan.most_workers == 1
    alone = {PULL: Effects(), "read": Effects(log, log), "work": Effects()}
    frozen = Limits(frozen=("work",))
    choice = auto_plan(loop(), SLOW, streams=False, effects=alone, body=False, limits=frozen)
    assert choice.plan.schedule["read"].thread_group != "default"
    assert choice.plan.most_workers == 1


def test_a_group_with_a_task_that_may_not_run_beside_itself_has_one_worker() -> None:
    """Reading appends to a log; decoding, which may have workers, is on its thread."""
    plan = PipelinePlan(
        schedule=dict.fromkeys(("read", "decode", "work"), TaskSchedule()),
        deps=[("decode", "read"), ("work", "decode")],
    )
    times = {"read": 40, "decode": 10, "work": 45}
    costs = CostModel({name: TaskCost(host_us=us) for name, us in times.items()})
    log = frozenset([Location("log", True)])
    effects = {PULL: Effects(), "read": Effects(log, log), "decode": Effects(), "work": Effects()}
    limits = Limits(groups=2, frozen=("work",))
    choice = auto_plan(plan, costs, streams=False, effects=effects, body=False, limits=limits)
    assert (choice.ii_us, choice.bounds.ii_us, choice.plan.most_workers) == (50, 45, 1)


def test_a_frozen_task_has_no_workers() -> None:
    """It is on the caller's thread, even if short: no plan is faster than this task alone."""
    costs = CostModel({"read": TaskCost(host_us=400), "work": TaskCost(host_us=600)})
    effects = {PULL: Effects(), "read": Effects(), "work": Effects()}
    limits = Limits(frozen=("work",))
    choice = auto_plan(loop(), costs, streams=False, effects=effects, body=False, limits=limits)
    assert (choice.ii_us, choice.bounds.ii_us, choice.plan.most_workers) == (600, 600, 1)
