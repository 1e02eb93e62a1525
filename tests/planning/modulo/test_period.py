"""One period, played: what it promises, and what sets it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from swpipe import PipelinePlan
from swpipe.core.costs import CostModel
from swpipe.planning import Limits, simulate
from swpipe.planning.modulo.beginnings import beginning
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.walk import Walk
from tests.planning.instances import Instance, instance
from tests.planning.modulo.graphs import Listener, graph_of, host_work, plan_at

DEPTH = 5


def uncontended(number: int) -> Instance:
    """An instance in which nothing is had by who comes first: the order of the plan says it all."""
    given = instance(number)
    costs = {
        name: replace(cost, gil_us=0.0, resources=())
        for name, cost in given.costs.of(given.plan.schedule).items()
    }
    schedule = {
        name: replace(entry, globally_ordered=False) for name, entry in given.plan.schedule.items()
    }
    # On a device one thread feeds the caller's stream: several would take turns as they come.
    threads = 1 if given.streams else given.limits.threads
    return replace(
        given,
        plan=PipelinePlan(
            schedule, deps=given.plan.deps, cross_iter_deps=given.plan.cross_iter_deps
        ),
        costs=CostModel(costs, handover_us=given.costs.handover_us),
        limits=Limits(threads=threads, frozen=given.limits.frozen),
    )


@pytest.mark.parametrize("number", range(40))
def test_a_period_that_nobody_contends_keeps_its_promise(number: int) -> None:
    """The plan's interval is never longer, admission, retirement and back-pressure included."""
    given = uncontended(number)
    graph = graph_of(given)
    place = beginning(graph, DEPTH, given.limits.threads)
    assert place is not None
    period, listener = Period(graph, given.limits.threads, DEPTH), Listener()
    walk = Walk(period, random.Random(number), rehearses=False)
    walk.go(place, 150, listener, lanes_change=True)
    promises = dict(zip(listener.heard, listener.promised_us, strict=True))
    for somewhere, promised_us in list(promises.items())[:12]:
        plan = plan_at(given, graph, somewhere)
        found = simulate(plan, given.costs, streams=given.streams)
        assert found.ii_us <= promised_us * (1 + 1e-9)


def test_a_dependence_within_the_period_is_waited_for() -> None:
    """Two threads, and no stages: they take as long as one."""
    period = Period(host_work(300, 500), threads=2, depth=1)
    period.play((0, 1), (0, 1), (0, 0))
    assert period.us == 800


def test_stages_take_dependences_out_of_the_period() -> None:
    """Two threads, each on an iteration of its own: the longer one sets the interval."""
    period = Period(host_work(300, 500), threads=2, depth=2)
    period.play((1, 0), (0, 1), (0, 1))
    assert period.us == 500


def test_a_wait_for_another_thread_costs_a_handover() -> None:
    """The task on a worker waits for its admission, its consumer for it, and <retire> for that."""
    period = Period(host_work(300, 500, handover_us=20), threads=2, depth=1)
    period.play((0, 1), (1, 0), (0, 0))
    assert period.us == 20 + 300 + 20 + 500


def test_admission_is_waited_for_in_later_stages_too() -> None:
    """A worker's task begins a period later: as long as that, at least, it takes to hear of it."""
    period = Period(host_work(100, 100, 100, chain=False, handover_us=1_000), threads=2, depth=3)
    period.play((0, 1, 2), (0, 1, 0), (0, 1, 2))
    assert period.us == 1_000


def test_an_iteration_ends_when_the_last_worker_has_said_so() -> None:
    """It hears of its task and ends it at 1,100; a period after the caller's 100 that is known."""
    period = Period(host_work(100, 100, chain=False, handover_us=1_000), threads=2, depth=2)
    period.play((0, 1), (1, 0), (0, 1))
    assert period.us == 1_000 + 100 + 1_000 - 100


def test_what_counts_is_how_far_stages_are_apart() -> None:
    """An iteration is admitted ahead of its first task, whatever that one's stage is called."""
    period = Period(host_work(300, 500, handover_us=20), threads=2, depth=2)
    sooner = period.play((0, 1), (1, 0), (0, 0))
    assert period.play((0, 1), (1, 0), (1, 1)) == sooner


def test_who_comes_later_in_the_order_waits() -> None:
    """One thread runs one task at a time."""
    period = Period(host_work(300, 500, chain=False), threads=1, depth=1)
    period.play((1, 0), (0, 0), (0, 0))
    assert period.us == 800


def test_a_period_beyond_the_limit_is_not_played_to_its_end() -> None:
    """It costs infinity; at the limit itself it costs what it costs."""
    period = Period(host_work(300, 500), threads=1, depth=1)
    cost = period.play((0, 1), (0, 0), (0, 0))
    assert period.play((0, 1), (0, 0), (0, 0), limit_us=cost) == cost
    assert period.play((0, 1), (0, 0), (0, 0), limit_us=799) == math.inf


def test_of_two_plans_with_one_interval_the_one_with_less_waiting_costs_less() -> None:
    """The worker's last task waits for the caller's, or for nothing since it is a stage on."""
    period = Period(host_work(100, 300, 100), threads=2, depth=2)
    waiting = period.play((0, 1, 2), (1, 0, 1), (1, 1, 1))
    assert period.us == 500
    at_once = period.play((2, 0, 1), (1, 0, 1), (0, 0, 1))
    assert period.us == 500
    assert at_once < waiting


def test_critical_tasks_are_those_that_set_the_interval() -> None:
    """The last one, and what it waited for; not the one on a thread of its own."""
    graph = host_work(300, 500, 100)
    period = Period(graph, threads=2, depth=2)
    period.play((2, 0, 1), (0, 0, 1), (0, 0, 1))
    assert period.us == 800
    assert period.critical() == [1, 0]
