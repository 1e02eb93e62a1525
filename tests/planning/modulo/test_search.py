"""The search: what it says of a plan is what the simulator says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.planning.modulo.beginnings import beginning
from swpipe.planning.modulo.compiled import COMPILED
from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.loop_graph import loop_graph
from swpipe.planning.modulo.search import _REST, Search, _Quest
from tests.planning.instances import Instance, instance
from tests.planning.modulo.graphs import graph_of


def search_of(given: Instance) -> Search:
    """A search that has not begun."""
    return Search(given.plan, given.costs, graph_of(given))


def test_a_bound_that_was_enough_once_is_not_taken_for_an_interval() -> None:
    """Who needs no exact interval is told a lower bound; it must not stay as the interval."""
    given = instance(6)
    search = search_of(given)
    serial = search.serial().plan
    exact_us = simulate(serial, given.costs).ii_us
    search._seen.clear()
    size, order = search.graph.size, {name: v for v, name in enumerate(search.graph.names)}
    layout = Layout((0,) * size, (0,) * size, tuple(order[name] for name in serial.order), 1)
    roughly = search.judged(layout, 1, enough_us=1.0)
    assert roughly is not None
    assert 1.0 <= roughly.ii_us <= exact_us
    assert not search._seen
    assert search.serial().ii_us == exact_us


@pytest.mark.parametrize("number", [3, 36, 199])
def test_effort_is_bounded_and_some_is_left_for_depth_and_threads(number: int) -> None:
    """A loop whose bound is out of reach takes no more than its share."""
    search = search_of(instance(number))
    whole = search.effort
    search.best(4, 5)
    # A walk stops when it is spent; only deals, once begun, are looked at to the end.
    assert _REST * whole / 3 <= search.effort <= _REST * whole


def test_what_walks_cost_is_taken_from_the_effort() -> None:
    """So much that none is left for a share of none, which finds nothing then."""
    search = search_of(instance(17))
    search.trusts, whole = True, search.effort
    assert search.reach(1.0, threads=2, depth=3, share=0.0) is None
    assert search.effort == whole
    assert search.reach(1.0, threads=2, depth=3, share=0.02) is not None
    assert search.effort < 0.981 * whole


def test_chance_is_another_one_once_a_promise_was_broken() -> None:
    """Or else the same plan would be found again."""
    search = search_of(instance(17))
    first, again = (search.chance(2, 3).random() for _ in range(2))
    search.broken += 1
    assert first == again != search.chance(2, 3).random()


def test_a_search_for_more_than_there_is_hands_back_the_best_there_was() -> None:
    """The plan is as good as it says, and within the limits."""
    given = instance(17)
    search = search_of(given)
    found = search.reach(1.0, threads=2, depth=3, share=0.3)
    assert found is not None
    assert found.plan.depth <= 3
    assert found.threads <= 2
    assert simulate(found.plan, given.costs, streams=False).ii_us == found.ii_us


def test_work_that_cannot_be_shared_out_evenly_is_bound_by_its_best_share() -> None:
    """Beyond the sum over the threads: no plan is proved better by trying."""
    search = search_of(instance(17))
    graph = search.graph
    assert search.bound_us(4, 5) > sum(graph.host_us) / 4


def test_a_promise_waits_while_judging_has_had_its_share() -> None:
    """The simulator takes as long as the walks, and no longer; a plan that ends all is judged."""
    search = search_of(instance(17))
    place = beginning(search.graph, 5, 4)
    assert place is not None
    quest = _Quest(search, 100.0, threads=4, depth=5, reserve=0.0)
    quest.judging = math.inf
    assert quest.ask(place, 12_345.0) == 12_345.0
    assert quest.best is None
    quest.ask(place, 100.0)
    assert quest.best is not None


def test_what_waits_is_judged_at_the_end_of_a_walk() -> None:
    """A plan that nobody asked about is not lost."""
    search = search_of(instance(17))
    quest = _Quest(search, 1.0, threads=4, depth=5, reserve=search.effort - 100)
    quest.judging = math.inf
    quest.walk()
    assert quest.best is not None


def test_a_promise_that_is_not_kept_is_not_made_again() -> None:
    """The simulator has the last word; from then on it counts, and there is effort left."""
    search = search_of(instance(17))
    search.trusts = True
    place = beginning(search.graph, 5, 4)
    assert place is not None
    shifted = replace(place, stages=tuple(s - min(place.stages) for s in place.stages))
    promised = search.trusted(shifted, 5, promised_us=1_000.0)
    assert promised is not None
    assert promised.ii_us == 1_000.0
    search.effort = 0.0
    assert search.confirmed(promised) is None
    assert search.effort > 0
    true_us = simulate(promised.plan, search.costs, streams=False).ii_us
    again = search.trusted(shifted, 5, promised_us=1_000.0)
    assert again is not None
    assert again.ii_us == true_us
    for modest in (again, replace(again, ii_us=2 * true_us)):
        confirmed = search.confirmed(modest)
        assert confirmed is not None
        assert confirmed.ii_us == true_us


def test_who_breaks_promises_again_and_again_is_trusted_no_more() -> None:
    """Then the simulator is asked about every plan of interest."""
    search = search_of(instance(17))
    search.trusts = True
    place = beginning(search.graph, 5, 4)
    assert place is not None
    for depth in (5, 6, 7, 8):
        assert search.trusts
        shifted = replace(place, stages=tuple(s - min(place.stages) for s in place.stages))
        promised = search.trusted(shifted, depth, promised_us=1_000.0)
        assert promised is not None
        assert search.confirmed(promised) is None
    assert not search.trusts


@pytest.mark.parametrize("number", [54, 83, 179])
def test_the_interval_of_a_choice_is_the_simulators(number: int) -> None:
    """Also where a rehearsal was wrong on the way."""
    given = instance(number)
    choice = auto_plan(given.plan, given.costs, limits=given.limits, streams=given.streams)
    found = simulate(choice.plan, given.costs, streams=given.streams)
    assert choice.ii_us == found.ii_us


def test_who_may_promise_a_plan_that_cannot_be_said_is_not_trusted() -> None:
    """Pairs that reach into later iterations are kept by some plans alone: each is asked about."""
    costs = CostModel({"read": TaskCost(host_us=300), "work": TaskCost(host_us=700)})
    for stage, trusts in ((0, COMPILED), (1, False)):
        plan = PipelinePlan(
            {"read": TaskSchedule(), "work": TaskSchedule(stage=stage)},
            same_period_deps=[("work", "read")],
        )
        graph = loop_graph(plan, costs, Limits(), streams=False)
        assert Search(plan, costs, graph).trusts == trusts
