"""The search: what it says of a plan is what the simulator says."""

from __future__ import annotations

from swpipe.plans import simulate
from swpipe.plans.modulo.loop_graph import loop_graph
from swpipe.plans.modulo.search import Search
from tests.plans.instances import instance


def test_a_bound_that_was_enough_once_is_not_taken_for_an_interval() -> None:
    """Who needs no exact interval is told a lower bound; it must not stay as the interval."""
    given = instance(6)
    graph = loop_graph(given.plan, given.costs, given.limits, streams=True)
    search = Search(given.plan, given.costs, graph)
    serial = search.serial().plan
    exact_us = simulate(serial, given.costs).ii_us
    search._seen.clear()
    roughly = search._found(serial, (0,) * graph.size, enough_us=1.0)
    assert roughly is not None
    assert 1.0 <= roughly.ii_us <= exact_us
    assert not search._seen
    assert search.serial().ii_us == exact_us
