"""Moves: each makes another schedule that keeps all dependences."""

from __future__ import annotations

import random

import pytest

from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.moves import Moves
from swpipe.planning.modulo.schedule_graph import ScheduleGraph
from swpipe.planning.modulo.starts import first_schedule, packed
from tests.planning.instances import instance
from tests.planning.modulo.graphs import graph_of, host_work


def assert_valid(graph: ScheduleGraph, schedule: ModuloSchedule, threads: int, depth: int) -> None:
    """Check that all tasks occur once, no lag is below 0, and lags of 0 are in order."""
    place = {v: k for k, v in enumerate(schedule.order)}
    assert sorted(place) == list(range(graph.size))
    assert set(schedule.thread) <= set(range(threads))
    assert set(schedule.stage) <= set(range(depth))
    for c, p, distance in graph.deps:
        lag = schedule.stage[c] - schedule.stage[p] + distance
        assert lag > 0 or (lag == 0 and (c == p or place[p] < place[c]))
    for v in graph.frozen:
        assert schedule.stage[v] == max(schedule.stage)
        assert schedule.thread[v] == 0


@pytest.mark.parametrize("number", range(10))
def test_moves_keep_dependences_and_limits(number: int) -> None:
    """Hundreds of moves follow each other, from the first schedule."""
    given = instance(number, tight=True)
    graph, rng = graph_of(given), random.Random(number)
    threads, depth = given.limits.groups, given.limits.in_flight
    start = first_schedule(graph, threads, depth)
    assert start is not None
    assert_valid(graph, start, threads, depth)
    moves, made = Moves(graph, threads, depth, rng.random), {start}
    schedule = start
    for _ in range(400):
        moved = moves.move(schedule, rng.randrange(graph.size), to_threads=True)
        if moved is not None:
            assert_valid(graph, moved, threads, depth)
            made.add(moved)
            schedule = moved
    assert len(made) > 6


def test_tasks_stay_on_their_threads_where_that_is_asked() -> None:
    """Only order and stages change."""
    graph, rng = graph_of(instance(3)), random.Random(1)
    start = first_schedule(graph, 3, 5)
    assert start is not None
    moves = Moves(graph, 3, 5, rng.random)
    schedule = start
    for _ in range(100):
        schedule = moves.move(schedule, rng.randrange(graph.size), to_threads=False) or schedule
    assert schedule.thread == start.thread
    assert schedule.stage != start.stage


def test_packed_tasks_fit_on_their_threads() -> None:
    """No thread has more work, frozen tasks are the caller's; None if it is impossible."""
    graph, rng = host_work(300, 200, 200, 100, frozen=("d",)), random.Random(1)
    found = [
        packed(graph, (0, 1, 2, 3), 2, 500, lambda work: rng.choice([*work])) for _ in range(50)
    ]
    fitting = [thread for thread in found if thread is not None]
    assert fitting
    for thread in fitting:
        assert thread[3] == 0
        assert sum(us for us, k in zip(graph.host_us, thread, strict=True) if k == 0) <= 500
        assert sum(us for us, k in zip(graph.host_us, thread, strict=True) if k == 1) <= 500
    assert packed(graph, (0, 1, 2), 2, 250, min) is None
    assert packed(graph, (2, 1, 0), 2, 500, min) == (1, 0, 0, 0)
