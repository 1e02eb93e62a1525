"""The joint search: its limits, its moves, what it discards, and what it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import recsys14
from docs.examples.published_planners import JointSearch, assign_lookaheads, joint_search
from docs.examples.published_planners.joint import Evaluated, SearchSpace, policies, prune, swaps
from docs.examples.published_planners.queue_rules import (
    caller_tasks,
    closest_order,
    communicator_queues,
)
from docs.examples.published_planners.task_roles import GIVEN, TaskRoles
from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import Limits, lower_bounds, simulate
from tests.docs.published_planners.papers import paper
from tests.support.budget import seeds
from tests.support.safety import verify_tasks


def blocking(**us: float) -> CostModel:
    """Return costs of host work alone, in microseconds."""
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


def spaced(
    plan: PipelinePlan = STEP, costs: CostModel = COSTS, limits: Limits | None = None
) -> tuple[SearchSpace, list[Evaluated]]:
    """Return the search space of a plan, and the layouts with which the search begins."""
    space = SearchSpace(plan, costs, limits or Limits(), streams=True)
    return space, space.evaluate(space.initial())


def threads_of(found: JointSearch) -> set[str]:
    """Return the thread groups of a result, including the caller's."""
    return {"default", *(entry.thread_group for entry in found.plan.schedule.values())}


# ------------------------------------------------------------------------------ what is searched


def test_threads_are_limited() -> None:
    """Each additional thread hides more blocking host work, up to the limit."""
    for threads, ii_us, preset in (
        (1, 180, "as given"),
        (3, 70, "io_data_dist_compute"),
    ):
        found = joint_search(STEP, COSTS, limits=Limits(groups=threads))
        assert (found.ii_us, found.threads) == (ii_us, preset)
        assert len(threads_of(found)) == threads


def test_of_equals_the_one_with_fewer_threads_is_chosen() -> None:
    """Device work alone needs no second thread."""
    costs = CostModel({n: TaskCost(device_us=cost.host_us) for n, cost in COSTS.tasks.items()})
    found = joint_search(STEP, costs)
    assert found.ii_us == lower_bounds(STEP, costs).ii_us == 60
    assert threads_of(found) == {"default"}


def test_streams_are_searched() -> None:
    """The tasks of a bundle move together, to each other stream; on a CPU none does."""
    space, (first, *_) = spaced()
    tried = {layout.streams for layout in space.neighbours(first)}
    assert ("dist", "dist", "cache", None) in tried
    assert ("memcpy", "cache", "cache", None) in tried
    assert len(tried) == 1 + 3 * 2
    on_cpu = SearchSpace(STEP, COSTS, Limits(), streams=False)
    (first, *_) = on_cpu.evaluate(on_cpu.initial())
    assert {layout.streams for layout in on_cpu.neighbours(first)} == {first.layout.streams}
    space, (first, *_) = spaced(limits=Limits(frozen=["dist"]))
    assert {layout.streams[1] for layout in space.neighbours(first)} == {"dist"}


def test_only_unordered_neighbours_are_swapped() -> None:
    """Edges within the period and a communicator's queue keep their order."""
    plan = PipelinePlan(
        {name: TaskSchedule() for name in "abcd"},
        deps=[("b", "a")],
        cross_iter_deps=[("c", "b", 1)],  # of another period: b and c are free in this one
    )
    order = tuple("abcd")
    assert list(swaps(plan, order, ())) == [tuple("acbd"), tuple("abdc")]
    assert list(swaps(plan, order, (("c", "d"),))) == [tuple("acbd")]


FIRST = {
    # The caller's own, by the way that is left; then h2d, whose way is the longest.
    "critical chain first": ["zero_grad", "nccl_safety_barrier", "forward"],
    # The longest of the preparation, whatever comes after it.
    "longest elsewhere first": ["start_input_dist", "start_shuffle", "finish_shuffle"],
    # The communicator's queue.
    "collectives early": ["start_shuffle", "finish_shuffle", "start_input_dist"],
    # The io role, and what else holds the copy engine.
    "copies early": ["h2d", "start_shuffle", "finish_shuffle", "prefetch_embeddings"],
    # The chain without slack: the preparation first, since all of training waits for it.
    "least slack first": ["h2d", "start_shuffle", "finish_shuffle", "start_input_dist"],
}


def test_what_policies_rank_first() -> None:
    """The published step shows it; the closest order keeps edges and the communicator's queue."""
    plan, costs = recsys14.plan(), recsys14.costs()
    resolved = resolve_plan(plan)
    queues = communicator_queues(resolved, costs)
    roles = TaskRoles.of(resolved, recsys14.FROZEN)
    for policy, rank in policies(resolved, costs, roles).items():
        ranked = sorted(resolved.period_order, key=rank)
        assert ranked[: len(FIRST[policy])] == FIRST[policy]
        order = closest_order(plan, ranked, queues)
        assert all(order.index(before) < order.index(after) for after, before in plan.deps)
        assert [n for n in order if n in queues[0]] == list(queues[0])


def test_the_search_starts_from_the_given_and_the_engines_order() -> None:
    """Each starts with the plan's own threads, and with the default preset."""
    free = PipelinePlan(
        {"a": TaskSchedule(stream="a"), "b": TaskSchedule(stream="b"), "train": TaskSchedule()},
        deps=[("train", "a"), ("train", "b")],
        order=["b", "a"],
    )
    space, _ = spaced(free, blocking(a=1, b=1, train=1))
    initial = {(layout.threads, layout.priority) for layout in space.initial()}
    orders = (("b", "a", "train"), ("a", "b", "train"))
    assert initial == {(threads, order) for threads in (GIVEN, "default") for order in orders}


def test_frozen_and_caller_tasks_are_not_moved() -> None:
    """They keep lookahead 0, the caller's thread and their stream in every result."""
    limits = Limits(frozen=["cache"])
    found = joint_search(STEP, COSTS, limits=limits)
    last = found.plan.max_stage
    assert found.plan.schedule["cache"] == TaskSchedule(last, "cache")
    assert found.plan.schedule["train"] == TaskSchedule(last)
    groups = {n: replace(e, thread_group="io") for n, e in STEP.schedule.items()}
    _, initial = spaced(replace(STEP, schedule=groups), limits=limits)
    assert {one.plan.schedule["cache"].thread_group for one in initial} == {"default"}


# ------------------------------------------------------------------------------- the search


def test_the_search_ends_after_rounds_that_find_nothing_better() -> None:
    """It says how many layouts it has tried, none of them twice, and why it has ended."""
    found = joint_search(STEP, COSTS, patience=1)
    # The first round finds something better, and so does not count; the second does not.
    assert "candidates tried: 61, until patience ran out" in found.why
    assert joint_search(STEP, COSTS, patience=1) == found
    start = joint_search(STEP, COSTS, rounds=0)
    assert (start.ii_us, found.ii_us) == (120, 60)
    assert "candidates tried: 2, until all rounds were used" in start.why
    single = joint_search(PipelinePlan({"train": TaskSchedule()}), blocking(train=5))
    assert single.ii_us == 5
    assert "until nothing was left to try" in single.why


def test_the_best_layout_of_each_place_is_kept() -> None:
    """Orders of the same threads, streams and lookaheads do not fill the beam."""
    space, initial = spaced()
    near = space.evaluate(layout for one in initial for layout in space.neighbours(one))
    best = prune(near)
    places = [layout.places for layout in best]
    assert {*places} == {layout.places for layout in near}
    assert len(places) == len({*places}) < len(near)
    for layout in best:
        assert layout.score == min(one.score for one in near if one.places == layout.places)


@pytest.mark.examples
@pytest.mark.parametrize("streams", [True, False])
def test_random_plans_keep_every_rule_and_become_no_slower(streams: bool) -> None:
    """They verify, have the reported interval, and keep limits and communicator order.

    None is worse than lookaheads alone, where the search begins.
    """
    better = 0
    for seed in seeds("plans", 8):
        given = paper(seed)
        said = {"limits": given.limits, "streams": streams}
        found = joint_search(given.plan, given.costs, beam_width=2, rounds=2, **said)  # type: ignore[arg-type]
        verify_tasks(found.plan, effects=given.effects, streams=streams)
        assert found.ii_us == simulate(found.plan, given.costs, streams=streams).ii_us
        assert found.given_ii_us == simulate(given.plan, given.costs, streams=streams).ii_us
        assert found.ii_us <= found.given_ii_us
        assert found.ii_us <= assign_lookaheads(given.plan, given.costs, **said).ii_us  # type: ignore[arg-type]
        assert found.plan.depth <= given.limits.in_flight
        assert len(threads_of(found)) <= given.limits.groups
        queues = communicator_queues(resolve_plan(given.plan), given.costs)
        assert communicator_queues(resolve_plan(found.plan), given.costs) == queues
        for name in caller_tasks(given.plan):
            stays = replace(given.plan.schedule[name], stage=0)
            assert replace(found.plan.schedule[name], stage=0) == stays
        better += found.ii_us < found.given_ii_us
    assert better


def test_the_published_step_reaches_its_bound() -> None:
    """The bound is the work on the caller's stream; lookaheads alone do not reach the order.

    If the host runs ahead, the given plan is as fast.
    """
    plan, costs = recsys14.plan(), recsys14.costs()
    assert simulate(plan, costs).ii_us == lower_bounds(plan, costs).ii_us == 108_380
    found = joint_search(replace(plan, run_ahead=0), costs, limits=recsys14.limits())
    assert (found.given_ii_us, found.ii_us) == (125_450, 108_380)
    assert (found.plan.depth, len(threads_of(found))) == (2, 1)
    # All thread presets, an order for each policy, and one for each swap, in three rounds.
    assert "candidates tried: 146" in found.why


# -------------------------------------------------------------------------------- bad input


def test_limits_that_allow_nothing_name_the_least_that_would() -> None:
    """These are one thread, where every preset has more, and fewer iterations than stages."""
    groups = {n: replace(e, thread_group=n) for n, e in STEP.schedule.items()}
    spread = replace(STEP, schedule=groups)
    with pytest.raises(PlanError, match=r"at least 2 thread groups \(as given: 5"):
        joint_search(spread, COSTS, limits=Limits(groups=1))
    assert len(threads_of(joint_search(spread, COSTS, limits=Limits(groups=2)))) == 2
    stages = {n: replace(e, stage=k) for k, (n, e) in enumerate(STEP.schedule.items())}
    with pytest.raises(PlanError, match="limit is 3 iterations in flight: allow 4"):
        joint_search(replace(STEP, schedule=stages), COSTS, limits=Limits(in_flight=3))
