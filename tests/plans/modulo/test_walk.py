"""Walks: every plan on the way can run, and the same numbers lead the same way."""

from __future__ import annotations

import random

import pytest

from swpipe.plans.modulo.beginnings import beginning
from swpipe.plans.modulo.period import Period
from swpipe.plans.modulo.walk import Walk
from swpipe.plans.simulation.paper import check_on_paper
from tests.plans.instances import Instance, instance
from tests.plans.modulo.graphs import Listener, graph_of, plan_at

DEPTH = 4


def walked(
    given: Instance, listener: Listener, steps: int = 300, *, lanes_change: bool = True
) -> Walk:
    """A walk on this instance."""
    graph = graph_of(given)
    layout = beginning(graph, DEPTH, given.limits.threads)
    assert layout is not None
    period = Period(graph, given.limits.threads, DEPTH)
    walk = Walk(period, random.Random(1))
    walk.go(layout, steps, listener, lanes_change=lanes_change)
    return walk


@pytest.mark.parametrize("number", range(12))
def test_every_plan_on_the_way_can_run(number: int) -> None:
    """Dependences, frozen tasks and limits are kept at every step."""
    given, listener = instance(number), Listener()
    walked(given, listener)
    graph = graph_of(given)
    for layout in dict.fromkeys(listener.heard):
        check_on_paper(plan_at(given, graph, layout))
        assert sorted(layout.order) == list(range(graph.size))
        assert set(layout.stages) <= set(range(DEPTH))
        assert set(layout.lanes) <= set(range(given.limits.threads))
        assert all((layout.lanes[v], layout.stages[v]) == (0, DEPTH - 1) for v in graph.frozen)


@pytest.mark.parametrize("number", [3, 53, 54])
def test_a_walk_finds_better_plans_than_the_one_it_begins_with(number: int) -> None:
    """By what they promise."""
    listener = Listener()
    walked(instance(number), listener, steps=600)
    assert min(listener.promised_us) < 0.97 * listener.promised_us[0]


def test_the_same_numbers_lead_the_same_way() -> None:
    """No chance but that which is handed in."""
    first, second = Listener(), Listener()
    walked(instance(17), first)
    walked(instance(17), second)
    assert first.heard == second.heard


def test_threads_stay_where_they_are_meant_to() -> None:
    """Only order and stages change."""
    listener = Listener()
    walked(instance(17), listener, lanes_change=False)
    assert len({layout.lanes for layout in listener.heard}) == 1
    assert len({layout.stages for layout in listener.heard}) > 1


def test_a_plan_that_does_not_keep_its_promise_is_left() -> None:
    """The word of who was asked counts for more than the promise."""
    listener = Listener(says_us=1e9)
    walk = walked(instance(17), listener)
    assert walk.here == listener.heard[0]


def test_who_is_satisfied_hears_no_more() -> None:
    """The walk ends there and then."""
    listener = Listener(enough=3)
    walked(instance(17), listener)
    assert len(listener.heard) == 3
