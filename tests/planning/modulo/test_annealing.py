"""Annealing: when the simulator is called, which schedule is the incumbent, when it ends."""

from __future__ import annotations

import math

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning.modulo.annealing import Annealer
from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.schedule_graph import schedule_graph
from swpipe.planning.modulo.starts import first_schedule
from tests.planning.instances import instance
from tests.planning.modulo.graphs import graph_of, host_work
from tests.support.strategies import random_case

GRAPH = host_work(300, 200, 200, 100)
FIRST = ModuloSchedule((0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 2, 3))


def exact(schedule: ModuloSchedule) -> float:
    """Return the estimate, in place of a simulation."""
    estimator = Estimator(GRAPH, 2, 3)
    estimator.cost(schedule)
    return estimator.ii_us


def test_it_ends_when_the_goal_is_reached_or_its_work_spent() -> None:
    """Two threads of 400 us each are the best; no schedule reaches 399."""
    annealer = Annealer(Estimator(GRAPH, 2, 3), exact, goal_us=400)
    annealer.search(FIRST, work=1e6)
    assert (annealer.done, annealer.ii_us) == (True, 400)
    assert annealer.work < 1e6
    found = []
    for _ in range(2):  # no clock is read, and the generator has a seed
        annealer = Annealer(Estimator(GRAPH, 2, 3), exact, goal_us=399)
        annealer.search(FIRST, work=20_000)
        assert (annealer.done, annealer.ii_us) == (False, 400)
        assert 20_000 <= annealer.work < 30_000
        found.append((annealer.incumbent, annealer.work))
    assert found[0] == found[1]


def test_the_simulator_has_the_last_word() -> None:
    """Its interval is twice the estimate, and becomes the incumbent's."""
    annealer = Annealer(Estimator(GRAPH, 2, 3), lambda schedule: 2 * exact(schedule), goal_us=400)
    annealer.search(FIRST, work=20_000)
    assert annealer.ii_us == 800
    assert annealer.incumbent is not None
    assert exact(annealer.incumbent) == 400


def test_no_schedule_is_simulated_twice() -> None:
    """The simulator's result is kept."""
    seen: list[ModuloSchedule] = []

    def simulate(schedule: ModuloSchedule) -> float:
        seen.append(schedule)
        return 2 * exact(schedule)

    Annealer(Estimator(GRAPH, 2, 3), simulate, goal_us=1).search(FIRST, work=20_000)
    assert len(seen) == len(set(seen)) > 1


def test_most_of_the_work_is_left_for_moves() -> None:
    """However often an estimate promises a better plan; a simulation takes 45 times as long."""
    graph = graph_of(instance(1, size=60))
    seen: list[ModuloSchedule] = []

    def simulate(schedule: ModuloSchedule) -> float:
        seen.append(schedule)
        return math.inf

    first = first_schedule(graph, 2, 5)
    assert first is not None
    annealer = Annealer(Estimator(graph, 2, 5), simulate, goal_us=1)
    annealer.search(first, work=2_000 * graph.size)
    assert 45 * len(seen) * graph.size < annealer.work / 2


def test_without_a_schedule_that_can_be_stated_there_is_no_incumbent() -> None:
    """The simulator returns infinity for a schedule that gives no plan."""
    annealer = Annealer(Estimator(GRAPH, 2, 3), lambda schedule: math.inf, goal_us=1)
    annealer.search(FIRST, work=5_000)
    assert annealer.incumbent is None


def test_every_schedule_that_is_estimated_keeps_the_dependences() -> None:
    """Half a move once broke the order; a walk along the waits then never ended."""
    given = random_case(136).plan
    costs = CostModel({name: TaskCost(host_us=10) for name in given.schedule})
    graph = schedule_graph(resolve_plan(given), costs, streams=False)
    broken: list[ModuloSchedule] = []

    class Checked(Estimator):
        def cost(self, schedule: ModuloSchedule, limit_us: float = math.inf) -> float:
            order = schedule.order
            stage = schedule.stage
            lags = [(c, p, stage[c] - stage[p] + distance) for c, p, distance in graph.deps]
            if any(k < 0 or (k == 0 and order.index(c) < order.index(p)) for c, p, k in lags):
                broken.append(schedule)
            return 0.0 if broken else super().cost(schedule, limit_us)

    annealer = Annealer(Checked(graph, 3, 4), lambda schedule: math.inf, goal_us=1)
    first = first_schedule(graph, 3, 4)
    assert first is not None
    annealer.search(first, work=50_000)
    assert broken == []
