"""The search under limits: its bounds, and plans of its schedules."""

from __future__ import annotations

import itertools
import math

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning import simulate
from swpipe.planning.modulo.bounds import bounds_of, least_load
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, plan_of
from swpipe.planning.modulo.schedule_graph import schedule_graph
from swpipe.planning.modulo.search import Search
from tests.planning.instances import Instance, held_back, instance
from tests.planning.modulo.graphs import graph_of, host_work


def search_of(given: Instance, effort: float = 0.1) -> Search:
    """Return a short search of the instance."""
    return Search(given.plan, given.costs, graph_of(given), effort)


@pytest.mark.parametrize("number", range(6))
def test_what_is_found_has_the_simulators_interval_and_keeps_the_bound(number: int) -> None:
    """This holds for the given limits, and for lower ones after that."""
    given = held_back(instance(number), number)
    search = search_of(given)
    threads, depth = given.limits.groups, given.limits.in_flight
    best = search.best(threads, depth)
    found = [best, search.reach(best.ii_us, 1, depth, 0.5), search.reach(best.ii_us, 1, 2, 0.5)]
    limits = [(threads, depth), (1, depth), (1, 2)]
    for each, (most_threads, most_depth) in zip(found, limits, strict=True):
        if each is not None:
            assert each.ii_us == simulate(each.plan, given.costs, streams=given.streams).ii_us
            assert each.ii_us >= search.bound_us(most_threads, most_depth) * (1 - 1e-9)
            assert each.schedule.threads <= most_threads
            assert each.plan.depth <= most_depth


def test_too_few_iterations_in_flight_have_no_bound() -> None:
    """A pair that reaches into the next iteration needs two."""
    plan = PipelinePlan(
        {"read": TaskSchedule(), "work": TaskSchedule(stage=1)}, same_period_deps=[("work", "read")]
    )
    costs = CostModel({"read": TaskCost(host_us=300), "work": TaskCost(host_us=700)})
    graph = schedule_graph(resolve_plan(plan), costs, streams=False)
    search = Search(plan, costs, graph)
    assert search.bound_us(2, 1) == math.inf
    assert search.bound_us(2, 2) < math.inf


def test_fewer_iterations_in_flight_have_a_higher_bound() -> None:
    """A chain of 15 ms on three threads takes 15 ms with one iteration in flight."""
    graph = host_work(5, 5, 5)
    assert [bounds_of(graph, 3, depth).ii_us for depth in (1, 2, 3)] == [15, 7.5, 5]


def test_frozen_tasks_of_two_iterations_do_not_overlap() -> None:
    """They are in one period, and so is everything between them."""
    assert bounds_of(host_work(5, 5, 5, frozen=("a", "c")), 2).ii_us == 15
    assert bounds_of(host_work(5, 5, 5, frozen=("c",)), 2).ii_us == 10


@pytest.mark.parametrize("number", range(4))
def test_the_least_load_is_that_of_the_best_distribution(number: int) -> None:
    """All distributions are tried."""
    given = instance(number, size=6)
    graph = graph_of(given)
    for threads in (1, 2, 3):
        loads = []
        for lanes in itertools.product(range(threads), repeat=graph.size):
            if not any(lanes[v] for v in graph.frozen):
                load = [0.0] * threads
                for v, k in enumerate(lanes):
                    load[k] += graph.host_us[v]
                loads.append(max(load))
        assert least_load(graph, threads) == pytest.approx(min(loads))


def test_of_many_tasks_the_mean_load_is_the_bound() -> None:
    """A distribution that reaches it nearly always exists."""
    assert least_load(host_work(*range(100, 126)), 2) == sum(range(100, 126)) / 2


def test_groups_keep_names_that_their_tasks_had() -> None:
    """They do so if a name is free; otherwise workers are numbered."""
    plan = PipelinePlan(
        {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule(), "c": TaskSchedule()}
    )
    costs = CostModel({name: TaskCost(host_us=1) for name in plan.schedule})
    graph = schedule_graph(resolve_plan(plan), costs, streams=False)
    found = plan_of(plan, graph, ModuloSchedule((1, 2, 0), (0, 0, 0), (0, 1, 2)), 1)
    assert found is not None
    groups = [entry.thread_group for entry in found.schedule.values()]
    assert groups == ["io", "worker 1", "default"]


@pytest.mark.parametrize(
    ("stages", "field"),
    [((0, 0), "deps"), ((0, 1), "same_period_deps")],
)
def test_a_same_period_pair_keeps_its_distance(stages: tuple[int, int], field: str) -> None:
    """If stages change, it becomes a dependence of the same distance."""
    base = PipelinePlan(
        {"read": TaskSchedule(), "work": TaskSchedule(stage=stages[1])},
        same_period_deps=[("work", "read")],
    )
    costs = CostModel({name: TaskCost(host_us=1) for name in base.schedule})
    graph = schedule_graph(resolve_plan(base), costs, streams=False)
    moved = plan_of(base, graph, ModuloSchedule((0, 0), (0, 1), (0, 1)), 2)
    assert moved is not None
    assert list(getattr(moved, field)) == [("work", "read")]
