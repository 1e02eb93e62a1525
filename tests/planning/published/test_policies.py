"""Orders to try: what each policy ranks first, and which neighbours may change places."""

from __future__ import annotations

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning import recsys14
from swpipe.planning.published.policies import POLICIES, PolicyInputs, ranked, swaps
from swpipe.planning.published.presets import Roles
from swpipe.planning.published.queue_rules import closest_order, communicator_queues

STEP = recsys14.plan()
COSTS = recsys14.costs()
RESOLVED = resolve_plan(STEP)
ORDER = list(RESOLVED.period_order)
OUTLOOK = PolicyInputs.of(RESOLVED, COSTS, Roles.of(RESOLVED, recsys14.FROZEN))


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        # The caller's own, by the way that is left; then h2d, whose way is the longest.
        ("critical chain first", ["zero_grad", "nccl_safety_barrier", "forward"]),
        # The longest of the preparation, whatever comes after it.
        ("longest elsewhere first", ["start_input_dist", "start_shuffle", "finish_shuffle"]),
        # The communicator's queue.
        ("collectives early", ["start_shuffle", "finish_shuffle", "start_input_dist"]),
        # The io role, and what else holds the copy engine.
        ("copies early", ["h2d", "start_shuffle", "finish_shuffle", "prefetch_embeddings"]),
        # The chain without slack: the preparation first, since all of training waits for it.
        ("least slack first", ["h2d", "start_shuffle", "finish_shuffle", "start_input_dist"]),
    ],
)
def test_what_a_policy_ranks_first(policy: str, first: list[str]) -> None:
    """On the published step."""
    assert list(ranked(policy, OUTLOOK, ORDER))[: len(first)] == first


def test_there_are_five_policies() -> None:
    """Each ranks all tasks, and no two of them alike."""
    rankings = {ranked(policy, OUTLOOK, ORDER) for policy in POLICIES}
    assert len(POLICIES) == len(rankings) == 5
    assert all(sorted(ranking) == sorted(STEP.schedule) for ranking in rankings)


def test_remaining_paths_and_slack() -> None:
    """In microseconds: a short branch has slack beside a longer one."""
    plan = PipelinePlan(
        {name: TaskSchedule() for name in ("a", "side", "main", "end")},
        deps=[("side", "a"), ("main", "a"), ("end", "side"), ("end", "main")],
    )
    times = {"a": 10, "side": 20, "main": 50, "end": 5}
    costs = CostModel({name: TaskCost(host_us=1, device_us=us - 1) for name, us in times.items()})
    resolved = resolve_plan(plan)
    inputs = PolicyInputs.of(resolved, costs, Roles.of(resolved))
    assert inputs.remaining_us == {"a": 65, "side": 25, "main": 55, "end": 5}
    assert inputs.slack_us == {"a": 0, "side": 30, "main": 0, "end": 0}


def test_no_order_breaks_an_edge_or_a_queue() -> None:
    """Under every policy producers precede consumers, and communicators keep their order."""
    queues = communicator_queues(RESOLVED, COSTS)
    for policy in POLICIES:
        order = closest_order(STEP, ranked(policy, OUTLOOK, ORDER), queues)
        place = {name: at for at, name in enumerate(order)}
        assert all(place[producer] < place[consumer] for consumer, producer in STEP.deps)
        assert [n for n in order if n in queues[0]] == list(queues[0])


def test_only_unordered_neighbours_are_swapped() -> None:
    """Neither an edge within the period, nor a communicator's queue."""
    plan = PipelinePlan(
        {name: TaskSchedule() for name in "abcd"},
        deps=[("b", "a")],
        cross_iter_deps=[("c", "b", 1)],  # of another period: b and c are free in this one
    )
    order = tuple("abcd")
    assert list(swaps(plan, order, [])) == [tuple("acbd"), tuple("abdc")]
    assert list(swaps(plan, order, [("c", "d")])) == [tuple("acbd")]
