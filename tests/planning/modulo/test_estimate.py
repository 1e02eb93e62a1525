"""The estimate of one period, and its reason."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning import Limits, simulate
from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, plan_of
from swpipe.planning.modulo.moves import Moves
from swpipe.planning.modulo.schedule_graph import schedule_graph
from swpipe.planning.modulo.starts import first_schedule
from tests.planning.instances import Instance, held_back, instance
from tests.planning.modulo.graphs import graph_of, host_work

DEPTH = 5


def uncontended(number: int) -> Instance:
    """Return an instance without contention, in which the order of the plan decides."""
    given = instance(number)
    costs = {
        name: replace(cost, gil_us=0.0, resources=())
        for name, cost in given.costs.of(given.plan.schedule).items()
    }
    schedule = {
        name: replace(entry, globally_ordered=False) for name, entry in given.plan.schedule.items()
    }
    # On a device one thread feeds the caller's stream: several would take turns as they come.
    threads = 1 if given.streams else given.limits.groups
    plan = PipelinePlan(schedule, deps=given.plan.deps, cross_iter_deps=given.plan.cross_iter_deps)
    given = replace(
        given,
        plan=plan,
        costs=CostModel(costs, handover_us=given.costs.handover_us),
        limits=Limits(groups=threads, frozen=given.limits.frozen),
    )
    return held_back(given, number)


def test_without_contention_no_estimate_is_too_low() -> None:
    """The simulator's interval is never longer, and for most schedules equal.

    This includes waits for other threads, back-pressure and tasks that block.
    """
    exact = 0
    for number in range(12):
        given = uncontended(number)
        graph, rng = graph_of(given), random.Random(number)
        threads = given.limits.groups
        first = first_schedule(graph, threads, DEPTH)
        assert first is not None
        moves = Moves(graph, threads, DEPTH, rng.random)
        schedule = first
        estimator = Estimator(graph, threads, DEPTH)
        for _ in range(12):
            for _ in range(4):
                task = rng.randrange(graph.size)
                schedule = moves.move(schedule, task, to_threads=True) or schedule
            estimator.cost(schedule)
            plan = plan_of(given.plan, graph, schedule, DEPTH)
            assert plan is not None
            simulated_us = simulate(plan, given.costs, streams=given.streams).ii_us
            assert simulated_us <= estimator.ii_us * (1 + 1e-9)
            exact += simulated_us == pytest.approx(estimator.ii_us)
    assert exact >= 100


def test_a_wait_for_another_thread_costs_a_handover() -> None:
    """The task on a worker waits for its admission, its consumer for it, and <retire> for that."""
    estimator = Estimator(host_work(300, 500, handover_us=20), threads=2, depth=1)
    estimator.cost(ModuloSchedule((1, 0), (0, 0), (0, 1)))
    assert estimator.ii_us == 20 + 300 + 20 + 500


def test_admission_is_waited_for_in_later_stages_too() -> None:
    """A worker's task begins a period later: it takes at least the time to wake up."""
    graph = host_work(100, 100, 100, chain=False, handover_us=1_000)
    estimator = Estimator(graph, threads=2, depth=3)
    estimator.cost(ModuloSchedule((0, 1, 0), (0, 1, 2), (0, 1, 2)))
    assert estimator.ii_us == 1_000


def test_an_iteration_ends_when_the_last_worker_has_said_so() -> None:
    """The worker ends at 1,100; the caller's next period of 100 follows."""
    estimator = Estimator(host_work(100, 100, chain=False, handover_us=1_000), threads=2, depth=2)
    estimator.cost(ModuloSchedule((1, 0), (0, 1), (0, 1)))
    assert estimator.ii_us == 1_000 + 100 + 1_000 - 100


@pytest.mark.parametrize(
    ("run_ahead", "blocks", "ii_us"),
    [(0, False, 800), (1, False, 500), (None, False, 500), (1, True, 800), (None, True, 800)],
)
def test_the_host_waits_for_the_device_where_it_may_not_run_ahead(
    run_ahead: int | None, blocks: bool, ii_us: float
) -> None:
    """It launches work of 500 us in 300 us; a task that blocks waits in any case."""
    plan = PipelinePlan({"a": TaskSchedule()}, run_ahead=run_ahead)
    costs = CostModel({"a": TaskCost(300, device_us=500, blocks=blocks)})
    graph = schedule_graph(resolve_plan(plan), costs, streams=True)
    estimator = Estimator(graph, threads=1, depth=1)
    estimator.cost(ModuloSchedule((0,), (0,), (0,)))
    assert estimator.ii_us == simulate(replace(plan, pipeline_depth=1), costs).ii_us == ii_us


def test_a_schedule_above_the_limit_is_given_up() -> None:
    """It costs infinity; at the limit itself it has its usual cost."""
    estimator = Estimator(host_work(300, 500), threads=1, depth=1)
    schedule = ModuloSchedule((0, 0), (0, 0), (0, 1))
    cost = estimator.cost(schedule)
    assert estimator.cost(schedule, limit_us=cost) == cost
    assert estimator.cost(schedule, limit_us=799) == math.inf


def test_of_two_schedules_with_one_interval_that_with_less_waiting_costs_less() -> None:
    """The worker's last task waits for the caller's task, or for nothing one stage later."""
    estimator = Estimator(host_work(100, 300, 100), threads=2, depth=2)
    waiting = estimator.cost(ModuloSchedule((1, 0, 1), (1, 1, 1), (0, 1, 2)))
    assert estimator.ii_us == 500
    at_once = estimator.cost(ModuloSchedule((1, 0, 1), (0, 0, 1), (2, 0, 1)))
    assert estimator.ii_us == 500
    assert at_once < waiting


def test_critical_tasks_are_those_that_set_the_interval() -> None:
    """These are the last one and what it waited for, not the one on a separate thread."""
    estimator = Estimator(host_work(300, 500, 100), threads=2, depth=2)
    estimator.cost(ModuloSchedule((0, 0, 1), (0, 0, 1), (2, 0, 1)))
    assert estimator.ii_us == 800
    assert estimator.critical() == [1, 0]
