"""The joint search: its limits, its moves, what it drops, and what it finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import (
    JointSearch,
    Limits,
    assign_lookaheads,
    joint_search,
    lower_bounds,
    recsys14,
    simulate,
)
from swpipe.planning.published import joint
from swpipe.planning.published.candidates import GIVEN, Evaluated, SearchSpace
from swpipe.planning.published.policies import POLICIES, PolicyInputs, ranked, swaps
from swpipe.planning.published.presets import PRESETS, Roles
from swpipe.planning.published.queue_rules import caller_tasks, communicator_queues
from tests.planning.papers import paper
from tests.support.safety import verify_tasks


def blocking(**us: float) -> CostModel:
    """Costs of host work alone; microseconds."""
    return CostModel({name: TaskCost(host_us=time) for name, time in us.items()})


STEP = PipelinePlan(
    {
        "copy": TaskSchedule(stream="memcpy"),
        "dist": TaskSchedule(stream="dist"),
        "cache": TaskSchedule(stream="cache"),
        "train": TaskSchedule(),
    },
    deps=[("dist", "copy"), ("cache", "dist"), ("train", "cache")],
    cross_iter_deps=[("train", "train")],
)
COSTS = blocking(copy=60, dist=50, cache=40, train=30)


def threads_of(found: JointSearch) -> set[str]:
    """The thread groups of what was found, the caller's too."""
    return {"default", *(entry.thread_group for entry in found.plan.schedule.values())}


@pytest.mark.parametrize(
    ("threads", "ii_us", "preset"),
    [
        (1, 180, "as given"),
        (2, 120, "default"),
        (3, 70, "io_data_dist_compute"),
        (4, 60, "by_stream"),
    ],
)
def test_threads_are_limited(threads: int, ii_us: float, preset: str) -> None:
    """Each additional thread hides more blocking host work; the limit holds."""
    found = joint_search(STEP, COSTS, limits=Limits(threads=threads))
    assert (found.ii_us, found.threads) == (ii_us, preset)
    assert len(threads_of(found)) == threads
    assert all(count > threads for count in found.rejected.values())


def test_a_thread_per_task_is_rejected_by_the_limit() -> None:
    """The published step has six tasks that are not the caller's: with the caller's, 7 threads."""
    found = joint_search(recsys14.plan(), recsys14.costs(), limits=recsys14.limits(), rounds=0)
    assert found.rejected == {"per_task": 7}


def test_in_flight_is_limited() -> None:
    """With fewer iterations in flight less is hidden by the same threads."""
    deep = joint_search(STEP, COSTS, limits=Limits(in_flight=5))
    flat = joint_search(STEP, COSTS, limits=Limits(in_flight=2))
    assert (deep.ii_us, flat.plan.depth) == (60, 2)
    assert flat.ii_us > deep.ii_us


def test_of_equals_the_one_with_fewer_threads_is_chosen() -> None:
    """Device work alone needs no second thread."""
    costs = CostModel({n: TaskCost(device_us=cost.host_us) for n, cost in COSTS.tasks.items()})
    found = joint_search(STEP, costs)
    assert found.ii_us == lower_bounds(STEP, costs).ii_us == 60
    assert threads_of(found) == {"default"}


def test_the_order_is_searched() -> None:
    """With threads, streams and lookaheads as they are, another order is a third quicker."""
    plan = PipelinePlan(
        {
            "quick": TaskSchedule(stream="a"),
            "key": TaskSchedule(stream="a"),
            "long": TaskSchedule(stream="b"),
            "train": TaskSchedule(),
        },
        deps=[("long", "key"), ("train", "long"), ("train", "quick")],
        cross_iter_deps=[("quick", "train"), ("key", "train")],
    )
    times = {"quick": 50, "key": 10, "long": 100, "train": 1}
    costs = CostModel({n: TaskCost(device_us=us) for n, us in times.items()})
    found = joint_search(plan, costs, limits=Limits(in_flight=1))
    assert (found.given_ii_us, found.ii_us) == (161, 111)
    assert "161 us become 111 us" in found.why


def test_streams_are_searched() -> None:
    """A bundle on a busy stream is faster on another."""
    space = SearchSpace(STEP, COSTS, Limits(), streams=True)
    (first, *_) = space.evaluate(space.initial())
    tried = {c.streams for c in space.neighbours(first)}
    assert ("dist", "dist", "cache", None) in tried
    assert ("memcpy", "cache", "cache", None) in tried
    assert len(tried) == 1 + 3 * 2
    on_cpu = SearchSpace(STEP, COSTS, Limits(), streams=False)
    (first, *_) = on_cpu.evaluate(on_cpu.initial())
    assert {c.streams for c in on_cpu.neighbours(first)} == {first.candidate.streams}


def test_the_tasks_of_a_bundle_move_together() -> None:
    """The caller's tasks never move, nor a frozen one that has a stream."""
    plan = recsys14.plan()
    space = SearchSpace(plan, recsys14.costs(), recsys14.limits(), streams=True)
    (first, *_) = space.evaluate(space.initial())
    bundles = {
        e.stream: [n for n in plan.schedule if plan.schedule[n].stream == e.stream]
        for e in plan.schedule.values()
    }
    for candidate in space.neighbours(first):
        stream = dict(zip(plan.schedule, candidate.streams, strict=True))
        assert all(len({stream[name] for name in tasks}) == 1 for tasks in bundles.values())
        assert {stream[name] for name in bundles[None]} == {None}
    frozen = SearchSpace(STEP, COSTS, Limits(frozen=["dist"]), streams=True)
    (first, *_) = frozen.evaluate(frozen.initial())
    assert {candidate.streams[1] for candidate in frozen.neighbours(first)} == {"dist"}


def test_every_preset_policy_and_swap_is_tried() -> None:
    """Of one candidate: all thread presets, an order for each policy, and one for each swap."""
    plan, costs = recsys14.plan(), recsys14.costs()
    space = SearchSpace(plan, costs, recsys14.limits(), streams=True)
    (first, *_) = space.evaluate(space.initial())
    near = list(space.neighbours(first))
    assert {candidate.threads for candidate in near} == {GIVEN, *PRESETS}
    order = first.candidate.priority
    resolved = resolve_plan(plan)
    inputs = PolicyInputs.of(resolved, costs, Roles.of(resolved, recsys14.FROZEN))
    policies = {ranked(policy, inputs, order) for policy in POLICIES}
    swapped = {*swaps(first.plan, order, communicator_queues(resolved, costs))}
    assert len(swapped) > 3
    assert {candidate.priority for candidate in near} == {order} | policies | swapped


def test_the_search_starts_from_the_given_and_the_engines_order() -> None:
    """Each with the plan's own threads, and with the default preset."""
    free = PipelinePlan(
        {"a": TaskSchedule(stream="a"), "b": TaskSchedule(stream="b"), "train": TaskSchedule()},
        deps=[("train", "a"), ("train", "b")],
        order=["b", "a"],
    )
    space = SearchSpace(free, blocking(a=1, b=1, train=1), Limits(), streams=True)
    initial = {(candidate.threads, candidate.priority) for candidate in space.initial()}
    orders = (("b", "a", "train"), ("a", "b", "train"))
    assert initial == {(threads, order) for threads in (GIVEN, "default") for order in orders}


def test_nothing_is_evaluated_twice() -> None:
    """Presets that give the same threads are one candidate."""
    space = SearchSpace(STEP, COSTS, Limits(), streams=True)
    initial = space.evaluate(space.initial())
    near = list(space.neighbours(initial[0]))
    assert space.evaluate(space.initial()) == []
    assert len(space.evaluate(near)) < len(near)
    assert space.evaluate(near) == []


def test_frozen_and_caller_tasks_are_not_moved() -> None:
    """Lookahead 0, the caller's thread, their stream: in whatever is found."""
    limits = Limits(frozen=["cache"])
    found = joint_search(STEP, COSTS, limits=limits)
    last = found.plan.max_stage
    assert found.plan.schedule["cache"] == TaskSchedule(last, "cache")
    assert found.plan.schedule["train"] == TaskSchedule(last)
    groups = {n: replace(e, thread_group="io") for n, e in STEP.schedule.items()}
    space = SearchSpace(replace(STEP, schedule=groups), COSTS, limits, streams=True)
    for one in space.evaluate(space.initial()):
        assert one.plan.schedule["cache"].thread_group == "default"


# ---------------------------------------------------------------------------------- pruning


def judged_of(plan: PipelinePlan, costs: CostModel, limits: Limits) -> list[Evaluated]:
    """What a first round judges."""
    space = SearchSpace(plan, costs, limits, streams=True)
    initial = space.evaluate(space.initial())
    return space.evaluate(near for one in initial for near in space.neighbours(one))


def test_pruned_candidates_are_dominated() -> None:
    """One with the same layout and no worse score is kept, and only one."""
    evaluated = judged_of(recsys14.plan(), recsys14.costs(), recsys14.limits())
    kept = joint.prune(evaluated)
    best = {one.layout: one.score for one in kept}
    assert len(best) == len(kept) < len(evaluated)
    assert all(best[one.layout] <= one.score for one in evaluated)
    assert all(any(one is other for other in evaluated) for one in kept)


def test_the_best_of_equal_layouts_is_kept() -> None:
    """Whichever comes first."""
    evaluated = judged_of(STEP, COSTS, Limits())
    one = evaluated[0]
    better = one._replace(ii_us=one.ii_us - 1)
    assert joint.prune([one, better]) == joint.prune([better, one]) == [better]


def test_pruning_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an unbounded beam, the search without pruning finds nothing better."""
    cases = [paper(seed, most_tasks=4) for seed in range(6)]

    def search(prune: bool) -> list[float]:
        if not prune:
            monkeypatch.setattr(joint, "prune", list)
        found = (
            joint_search(p.plan, p.costs, limits=p.limits, beam_width=10_000, rounds=2)
            for p in cases
        )
        return [one.ii_us for one in found]

    assert search(prune=True) == search(prune=False)


# ------------------------------------------------------------------------------- the search


def rises(values: Iterable[float]) -> bool:
    """Whether any value is above the one before it."""
    return any(later > sooner for sooner, later in pairwise(values))


def test_the_history_has_each_round() -> None:
    """What was tried and kept, the best of the round, and the best so far, which never rises."""
    found = joint_search(STEP, COSTS, limits=Limits(threads=4), rounds=5)
    assert [one.number for one in found.history] == list(range(len(found.history)))
    assert not rises(one.so_far_us for one in found.history)
    assert found.history[-1].so_far_us == found.ii_us
    assert all(one.best_us >= one.so_far_us for one in found.history)
    assert all(one.tried >= one.kept > 0 for one in found.history)


def test_it_ends_when_patience_does() -> None:
    """So many rounds without a better score, or so many rounds at all."""
    impatient = joint_search(STEP, COSTS, patience=1)
    # The first round finds something better, and so does not count; the second does not.
    assert [one.so_far_us for one in impatient.history] == [120, 60, 60]
    assert len(joint_search(STEP, COSTS, patience=3).history) == len(impatient.history) + 2
    assert "until patience ran out" in impatient.why
    assert len(joint_search(STEP, COSTS, rounds=0).history) == 1
    assert "until all rounds were used" in joint_search(STEP, COSTS, rounds=1).why


def test_it_ends_when_nothing_is_left_to_try() -> None:
    """A single caller's task has one plan."""
    found = joint_search(PipelinePlan({"train": TaskSchedule()}), blocking(train=5))
    assert (found.ii_us, len(found.history)) == (5, 1)
    assert "until nothing was left to try" in found.why


def test_the_beam_width_is_kept() -> None:
    """A wider one tries more."""

    def tried(width: int) -> int:
        found = joint_search(STEP, COSTS, beam_width=width, rounds=2, patience=2)
        return found.history[2].tried

    assert tried(1) < tried(4)


def test_it_is_deterministic(tmp_path: Path) -> None:
    """Again, and in a process that hashes names in another way, the result is the same."""
    case = paper(9)
    found = joint_search(case.plan, case.costs, limits=case.limits, rounds=2)
    assert joint_search(case.plan, case.costs, limits=case.limits, rounds=2) == found
    code = (
        "from tests.planning.papers import paper\n"
        "from swpipe.planning import joint_search\n"
        "case = paper(9)\n"
        "found = joint_search(case.plan, case.costs, limits=case.limits, rounds=2)\n"
        "print(found.plan.digest(), found.ii_us, found.why)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "77", "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == f"{found.plan.digest()} {found.ii_us} {found.why}"


@pytest.mark.parametrize("streams", [True, False])
def test_random_plans_keep_every_rule_and_become_no_slower(streams: bool) -> None:
    """They verify, have the reported interval, and keep limits and communicator order."""
    better = 0
    for seed in range(16):
        given = paper(seed)
        found = joint_search(
            given.plan, given.costs, limits=given.limits, beam_width=2, rounds=2, streams=streams
        )
        verify_tasks(found.plan, effects=given.effects, streams=streams)
        assert found.ii_us == simulate(found.plan, given.costs, streams=streams).ii_us
        assert found.given_ii_us == simulate(given.plan, given.costs, streams=streams).ii_us
        assert found.ii_us <= found.given_ii_us
        assert found.plan.depth <= given.limits.in_flight
        assert len(threads_of(found)) <= given.limits.threads
        queues = communicator_queues(resolve_plan(given.plan), given.costs)
        assert communicator_queues(resolve_plan(found.plan), given.costs) == queues
        for name in caller_tasks(given.plan):
            stays = replace(given.plan.schedule[name], stage=0)
            assert replace(found.plan.schedule[name], stage=0) == stays
        better += found.ii_us < found.given_ii_us
    assert better > 4


def test_it_is_never_worse_than_lookaheads_alone() -> None:
    """The search begins where the assignment ends."""
    for seed in range(20):
        given = paper(seed)
        found = joint_search(given.plan, given.costs, limits=given.limits, rounds=0)
        alone = assign_lookaheads(given.plan, given.costs, limits=given.limits)
        assert found.ii_us <= alone.ii_us


def test_the_published_step_reaches_its_bound() -> None:
    """What the caller's stream takes, with the order that lookaheads alone do not have.

    Where the host runs ahead, the plan given does not take longer.
    """
    plan, costs = recsys14.plan(), recsys14.costs()
    assert simulate(plan, costs).ii_us == lower_bounds(plan, costs).ii_us == 108_380
    found = joint_search(replace(plan, run_ahead=0), costs, limits=recsys14.limits())
    assert (found.given_ii_us, found.ii_us) == (125_450, 108_380)
    assert (found.plan.depth, len(threads_of(found))) == (2, 1)


# -------------------------------------------------------------------------------- bad input


def test_limits_that_allow_nothing_name_the_least_that_would() -> None:
    """One thread, where the plan and every preset have more; fewer iterations than stages."""
    groups = {n: replace(e, thread_group=n) for n, e in STEP.schedule.items()}
    spread = replace(STEP, schedule=groups)
    with pytest.raises(PlanError, match=r"at least 2 thread groups \(as given: 5"):
        joint_search(spread, COSTS, limits=Limits(threads=1))
    assert len(threads_of(joint_search(spread, COSTS, limits=Limits(threads=2)))) == 2
    stages = {n: replace(e, stage=k) for k, (n, e) in enumerate(STEP.schedule.items())}
    with pytest.raises(PlanError, match="limit is 3 iterations in flight: allow 4"):
        joint_search(replace(STEP, schedule=stages), COSTS, limits=Limits(in_flight=3))


def test_invalid_inputs_are_refused() -> None:
    """A task without a cost, a frozen one that is unknown, numbers out of range."""
    with pytest.raises(PlanError, match="task 'train' has no cost"):
        joint_search(STEP, blocking(copy=1, dist=1, cache=1))
    with pytest.raises(PlanError, match="freeze 'fwd', which the plan does not have"):
        joint_search(STEP, COSTS, limits=Limits(frozen=["fwd"]))
    for name, least in (("beam_width", 1), ("rounds", 0), ("patience", 1)):
        with pytest.raises(ValueError, match=f"{name} is {least - 1}: give an integer of {least}"):
            joint_search(STEP, COSTS, **{name: least - 1})
