"""Where walks begin: plans that can run, however the loop is."""

from __future__ import annotations

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits
from swpipe.planning.modulo.beginnings import Rule, beginning, beginnings
from swpipe.planning.modulo.loop_graph import loop_graph
from tests.planning.instances import instance
from tests.planning.modulo.graphs import device_work, graph_of, host_work, plan_at


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("number", range(20))
def test_all_are_plans_within_the_limits(number: int, depth: int) -> None:
    """Dependences are kept; frozen tasks are the caller's, and in the last stage."""
    given = instance(number)
    graph = graph_of(given)
    layouts = list(beginnings(graph, depth, given.limits.threads))
    assert layouts[0] == beginning(graph, depth, given.limits.threads)
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        validate(plan_at(given, graph, layout))
        assert max(layout.stages) == depth - 1
        assert min(layout.stages) >= 0
        assert set(layout.lanes) <= set(range(given.limits.threads))
        assert all((layout.lanes[v], layout.stages[v]) == (0, depth - 1) for v in graph.frozen)


def test_beginnings_are_of_many_kinds() -> None:
    """Two ways to cut an iteration, and three rules for the order."""
    given = instance(2, 40)
    assert len(list(beginnings(graph_of(given), 5, given.limits.threads))) == 2 * len(Rule)


def test_an_iteration_is_cut_into_parts_alike() -> None:
    """As many as there may be in flight."""
    layout = beginning(host_work(100, 100, 100, 100), 2, 2)
    assert layout is not None
    assert layout.stages == (0, 0, 1, 1)


def test_what_could_go_to_several_parts_goes_to_the_first_or_to_the_last() -> None:
    """Three tasks in a row, each of which makes a part, and one that depends on nothing."""
    graph = host_work(100, 100, 100, 10, chain=False, deps=(("b", "a"), ("c", "b")))
    for late, stage in ((False, 0), (True, 2)):
        layout = beginning(graph, 3, 2, late=late)
        assert layout is not None
        assert layout.stages == (0, 1, 2, stage)


@pytest.mark.parametrize(
    ("rule", "short_us", "order"),
    [
        (Rule.NON_DELAY, 120, "prqs"),
        (Rule.ACTIVE, 120, "pqrs"),
        (Rule.ACTIVE, 20, "prqs"),
        (Rule.ANY, 20, "pqrs"),
    ],
)
def test_the_rule_says_which_tasks_wait_for_one_with_a_longer_way(
    rule: Rule, short_us: float, order: str
) -> None:
    """While q waits for p, on another thread, r could start; s could even end where it is short."""
    graph = host_work(100, 300, 150, short_us, chain=False, deps=(("b", "a"),))
    layout = beginning(graph, 1, (1, 0, 0, 0), rule)
    assert layout is not None
    assert "".join("pqrs"[v] for v in layout.order) == order


def test_work_on_a_device_counts_as_time() -> None:
    """Submitting takes no time; b waits for a, and c, d could start at once, but end later."""
    graph = device_work(0, 100, 300, 150, 120, deps=(("b", "a"),))
    for rule, order in ((Rule.NON_DELAY, "acdb"), (Rule.ACTIVE, "abcd")):
        layout = beginning(graph, 1, 1, rule)
        assert layout is not None
        assert "".join("abcd"[v] for v in layout.order) == order


def test_threads_that_are_given_stay() -> None:
    """Only the order is chosen."""
    layout = beginning(host_work(100, 100, 100, 100), 2, (0, 1, 1, 0))
    assert layout is not None
    assert layout.lanes == (0, 1, 1, 0)


def test_the_longest_way_to_go_goes_first() -> None:
    """Of tasks that can start at once."""
    layout = beginning(host_work(100, 300, 200, chain=False), 1, 1)
    assert layout is not None
    assert layout.order == (1, 2, 0)


def test_too_few_iterations_in_flight_admit_none() -> None:
    """A pair of one period whose stages must differ."""
    plan = PipelinePlan(
        {"read": TaskSchedule(), "work": TaskSchedule(stage=2)},
        same_period_deps=[("work", "read")],
    )
    costs = CostModel({"read": TaskCost(host_us=1), "work": TaskCost(host_us=1)})
    graph = loop_graph(plan, costs, Limits(), streams=False)
    assert beginning(graph, 2, 1) is None
    assert beginning(graph, 3, 1) is not None
