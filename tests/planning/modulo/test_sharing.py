"""Host work shared out to threads."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swpipe.planning.modulo import sharing
from swpipe.planning.modulo.sharing import least_load, shared_out
from tests.planning.modulo.graphs import host_work

Times = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def load_of(lanes: tuple[int, ...], times: list[int]) -> int:
    """What the busiest thread has to do."""
    return max(
        sum(time for lane, time in zip(lanes, times, strict=True) if lane == k) for k in set(lanes)
    )


@settings(deadline=None)
@given(times=Times, threads=st.integers(1, 3), frozen=st.booleans())
def test_the_least_load_is_that_of_the_best_of_all_ways(
    times: list[int], threads: int, frozen: bool
) -> None:
    """Frozen tasks are the caller's in all of them."""
    graph = host_work(*times, frozen=("a",) if frozen else ())
    ways = product(range(threads), repeat=len(times))
    best = min(load_of(way, times) for way in ways if not (frozen and way[0]))
    even = max(sum(times) / threads, *times)
    assert least_load(graph, threads) == pytest.approx(max(best, even))


def test_a_bound_is_left_where_there_are_too_many_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not proved does not count: an even share is the bound then."""
    graph = host_work(30, 30, 30)
    assert least_load(graph, 2) == 60
    monkeypatch.setattr(sharing, "_MOST_NODES", 0)
    assert least_load(graph, 2) == 45


def test_many_tasks_are_taken_to_be_shared_out_evenly() -> None:
    """All ways are too many to look at."""
    assert least_load(host_work(*[100] * 201), 2) == 100 * 201 / 2


@given(times=Times, threads=st.integers(1, 3))
def test_frozen_tasks_stay_with_the_caller(times: list[int], threads: int) -> None:
    """However the rest is shared out."""
    graph = host_work(*times, frozen=("a",))
    lanes = shared_out(graph, threads)
    assert lanes[0] == 0
    assert set(lanes) <= set(range(threads))


def test_single_tasks_are_swapped_where_that_is_more_even() -> None:
    """The longest first, to who has least, gives 14 and 12; a swap makes it 13 and 13."""
    times = [7, 6, 5, 4, 4]
    lanes = shared_out(host_work(*times), 2)
    assert load_of(tuple(lanes), times) == 13
