"""plan_v_schedule: never worse than the published method and torch, in any memory, reproducible."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe.errors import InternalError
from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    ScheduleReport,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
    v_planner,
)
from swpipe.plans.pipeline_parallel.v_blocks import uniform_orders
from swpipe.plans.pipeline_parallel.v_order import (
    Objective,
    VOrders,
    lower_bound,
)
from swpipe.plans.pipeline_parallel.v_patterns import _with_swaps, swapped_patterns
from swpipe.plans.pipeline_parallel.v_planner import LocalSearch
from swpipe.plans.pipeline_parallel.v_starts import GreedyOrder
from tests.plans.pipeline_parallel.zbv_figures import MEMORY, PUBLISHED, Published
from tests.support.budget import examples

OBJECTIVES: tuple[Objective, ...] = ("makespan", "bubble")
ALL: tuple[Objective, ...] = (*OBJECTIVES, "period")


def test_a_plan_is_what_the_checker_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares no code with the search; where they disagree, swpipe is at fault."""

    def late(*given: Any) -> ScheduleReport:
        report = check_schedule(*given)
        return replace(report, makespan=report.makespan + 1)

    monkeypatch.setattr(v_planner, "check_schedule", late)
    with pytest.raises(InternalError, match="a schedule has the makespan"):
        plan_v_schedule(2, 2, PipelineCosts(), effort=0.01)


def figure(report: object, objective: Objective) -> float:
    """Return the figure of the objective."""
    return float(getattr(report, objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("row", [PUBLISHED[1], PUBLISHED[2]], ids=["2 ranks", "4 ranks"])
def test_plan_is_no_worse_than_published_and_torch(row: Published, objective: Objective) -> None:
    """Its makespan is strictly less, where the published one is not a lower bound."""
    plan = plan_v_schedule(row.n, row.m, row.costs, objective=objective, effort=0.02)
    published = {"makespan": row.makespan, "bubble": row.bubble}[objective]
    least = {"makespan": row.least_makespan, "bubble": row.least_bubble}[objective]
    torch = figure(check_schedule(torch_schedule("zbv", row.n, row.m), row.costs), objective)
    assert (plan.published, plan.lower_bound) == (published, least)
    assert figure(check_schedule(plan.schedule, row.costs), objective) == plan.value
    assert least <= plan.value <= min(published, torch)
    if objective == "makespan" and published > least:
        assert plan.value < published


@pytest.mark.parametrize(
    ("costs", "bubble", "makespan"),
    [
        ((1000, 1200, 800, 1), 204, 25203),
        ((14407, 14380, 9676, 50), 4931, 322234),
        ((1200, 1350, 900, 50), 500, 29100),
        ((1000, 1000, 1000, 300), 1200, 25900),
    ],
)
def test_proved_optima_are_reached(
    costs: tuple[int, int, int, int], bubble: int, makespan: int
) -> None:
    """A constraint solver proved them for two ranks and four microbatches."""
    for objective, best in zip(OBJECTIVES, (makespan, bubble), strict=True):
        plan = plan_v_schedule(
            2, 4, PipelineCosts(*costs, *MEMORY), objective=objective, effort=0.05
        )
        assert plan.value == best
        assert plan.is_optimal == (plan.lower_bound == best)


ONE_MICROBATCH = [
    [0, 1, 2, *rest] for rest in itertools.permutations((3, 4, 5)) if rest.index(3) < rest.index(5)
]
"""All orders of a rank with one microbatch."""


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "costs",
    [
        PipelineCosts((3, 1, 4, 4, 1, 3), (1, 5, 9, 9, 5, 1), (2, 6, 5, 5, 6, 2), 3),
        PipelineCosts(1, (0.5, 2.25, 1, 1.7, 3, 0.1), (9, 1, 1, 1, 1, 4), 0.3, 3, -1, -2, 6),
    ],
)
def test_a_plan_is_the_best_of_all_orders(costs: PipelineCosts, objective: Objective) -> None:
    """Costs by stage, integers or not; every order of three ranks is timed."""
    orders = VOrders(3, 1, costs)
    every = map(list, itertools.product(ONE_MICROBATCH, repeat=3))
    best, _ = min(orders.value(order, objective) for order in every)
    plan = plan_v_schedule(3, 1, costs, objective=objective, effort=0.05)
    assert plan.lower_bound <= best + 1e-9
    assert plan.value == pytest.approx(best, abs=1e-9)


def test_torch_order_is_tried_whatever_the_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other start is tried, the plan is still as good as torch's order."""
    monkeypatch.setattr(v_planner, "_PATTERN_PASSES", 0)
    row = next(r for r in PUBLISHED if r.torch_bubble < r.bubble)
    plan = plan_v_schedule(row.n, row.m, row.costs, objective="bubble", effort=1e-9)
    assert (plan.value, plan.published) == (row.torch_bubble, row.bubble)


@pytest.mark.parametrize(
    ("n", "costs", "chunks", "makespan"),
    [(4, (1000, 1000, 1000, 1), 4, 83056), (6, (1000, 1200, 800, 50), 8, 125000)],
    ids=["V-Min", "V-Half"],
)
def test_little_memory_is_used_as_well_as_by_the_published_blocks(
    n: int, costs: tuple[int, int, int, int], chunks: int, makespan: int
) -> None:
    """The figures of their published scheduler are met within half a percent."""
    limited = PipelineCosts(*costs, *MEMORY, chunks * MEMORY[0])
    assert plan_v_schedule(n, 3 * n, limited, effort=1e-9).value <= 1.005 * makespan


@pytest.mark.parametrize(
    ("n", "m", "forward", "backward", "weight", "hop", "chunks", "makespan"),
    [
        (8, 16, 10, 10, 10, 0, 8, 1190),
        (8, 16, 10, 10, 10, 0, 12, 1070),
        (4, 8, 10, 12, 8, 1, 6, 574),
        (4, 16, 10, 12, 8, 1, 6, 1054),
        (4, 8, 10, 15, 6, 2, 6, 654),
        (4, 16, 10, 15, 6, 2, 6, 1166),
    ],
)
def test_memory_between_the_published_blocks_is_used_as_well_as_by_a_search_over_uniform_blocks(
    n: int,
    m: int,
    forward: int,
    backward: int,
    weight: int,
    hop: int,
    chunks: int,
    makespan: int,
) -> None:
    """The figures are those of the published search, which tries each uniform block."""
    costs = PipelineCosts(
        forward, backward, weight, hop, f_mem=2, b_mem=0, w_mem=-2, max_mem=2 * chunks
    )
    assert plan_v_schedule(n, m, costs, effort=0.01).value <= makespan


@pytest.mark.parametrize(
    ("n", "m", "backward", "weight", "hop", "chunks", "makespan"),
    [
        (4, 8, 12, 8, 1, 4, 702),
        (4, 8, 15, 6, 2, 4, 864),
        (4, 16, 12, 8, 1, 4, 1310),
        (4, 16, 15, 6, 2, 4, 1648),
        (8, 16, 12, 8, 1, 8, 1420),
        (8, 16, 15, 6, 2, 8, 1764),
        pytest.param(8, 16, 15, 6, 2, 12, 1356, marks=pytest.mark.slow),
    ],
)
def test_with_any_effort_a_plan_is_no_worse_than_a_search_over_uniform_blocks(
    n: int, m: int, backward: int, weight: int, hop: int, chunks: int, makespan: int
) -> None:
    """These settings, of 27, need swapped patterns; the figures are the published search's."""
    costs = PipelineCosts(10, backward, weight, hop, f_mem=2, b_mem=0, w_mem=-2, max_mem=2 * chunks)
    assert plan_v_schedule(n, m, costs, effort=1e-9).value <= makespan


def test_swaps_of_a_pattern_are_made_in_all_places_and_in_runs_of_them() -> None:
    """Places do not overlap, from the first to the last."""
    row = [0, 1, 0, 1, 2, 0, 1]
    in_all = [1, 0, 1, 0, 2, 1, 0]
    in_halves = [[1, 0, 0, 1, 2, 0, 1], [0, 1, 1, 0, 2, 1, 0]]
    assert [*_with_swaps(row, "01", "10", 1)] == [in_all]
    assert [*_with_swaps(row, "01", "10", 2)] == in_halves
    assert [*_with_swaps(row, "01", "10", 4)] == []
    assert [*_with_swaps(row, "23", "32", 1)] == []


def test_with_the_memory_of_1f1b_no_uniform_block_is_tried() -> None:
    """The published method is better there, and ranking the blocks takes time."""
    costs = PipelineCosts(f_mem=2, b_mem=0, w_mem=-2, max_mem=16)
    assert [*uniform_orders(VOrders(4, 8, costs))] == []


def test_each_uniform_order_runs_within_the_memory() -> None:
    """The checker, which shares no code with the blocks, accepts each of them."""
    orders = VOrders(4, 8, PipelineCosts(f_mem=2, b_mem=0, w_mem=-2, max_mem=12))
    first = itertools.islice(uniform_orders(orders), 100)
    reports = [check_schedule(orders.schedule_of(order), orders.costs) for order in first]
    assert len(reports) == 100
    assert max(max(report.peak_memory) for report in reports) <= 12


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_memory_from_two_passes_on_has_a_schedule(n: int) -> None:
    """These are 2 f, 3 f, n f and 1.5 n f, with few microbatches and with many."""
    f = MEMORY[0]
    for m, limit in itertools.product((1, n, 3 * n), {2 * f, 3 * f, n * f, 1.5 * n * f}):
        if limit >= 2 * f:
            costs = PipelineCosts(1000, 1500, 500, 300, *MEMORY, limit)
            plan = plan_v_schedule(n, m, costs, effort=1e-9)
            assert max(check_schedule(plan.schedule, costs).peak_memory) <= limit


def in_turn(n: int, m: int) -> list[list[int]]:
    """Return the order of one microbatch after the other."""
    return [[0, 1, 2, 4, 3, 5] * m for _ in range(n)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, PipelineCosts]:
    """Draw ranks, microbatches and costs that may differ by stage, with little or much memory.

    The minimum is the need of one microbatch at a time, as the checker computes it.
    """
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    one = st.integers(1, 30)
    times = st.one_of(one, st.lists(one, min_size=2 * n, max_size=2 * n))
    size = draw(st.sampled_from((1, 2 * n)))
    f = [draw(st.integers(2, 9)) for _ in range(size)]
    b = [draw(st.integers(-one, one)) for one in f]  # above 0: computed once more, kept for W
    w = [-one - other for one, other in zip(f, b, strict=True)]
    work = draw(st.integers(0, 5))
    unit = draw(st.sampled_from((1, 0.1)))  # sums of floats are a little off
    memory = [[one * unit for one in row] if size > 1 else row[0] * unit for row in (f, b, w)]
    costs = PipelineCosts(
        *(draw(times) for _ in range(3)), draw(one), *memory, work_mem=work * unit
    )
    alone = VOrders(n, 1, costs).schedule_of(in_turn(n, 1))
    least = max(check_schedule(alone, replace(costs, max_mem=math.inf)).peak_memory)
    more = draw(st.one_of(st.none(), st.integers(0, 30 * n)))
    return n, m, replace(costs, max_mem=None if more is None else least + more * unit)


@examples("schedules", 40)
@given(jobs(), st.integers(0, 10**6))
def test_greedy_orders_are_valid_and_timed_like_the_checker(
    job: tuple[int, int, PipelineCosts], seed: int
) -> None:
    """This holds for any costs, any memory and any given order.

    No order is below the lower bounds.
    """
    n, m, costs = job
    orders = VOrders(n, m, costs)
    greedy = GreedyOrder(orders, in_turn(n, m)).make()
    search = LocalSearch(orders, "makespan", greedy, Random(seed))
    for _ in range(50):
        search.move()
    for order in (greedy, GreedyOrder(orders, search.order, eager=False).make()):
        schedule = orders.schedule_of(order)
        report, times = check_schedule(schedule, costs), orders.times(order)
        assert times is not None
        assert max(times.ends) == report.makespan
        assert tuple(times.bubbles) == report.bubbles
        assert orders.fits(order)
        assert orders.order_of(schedule) == order
        for objective in ALL:
            assert lower_bound(orders, objective) <= max(times.values(objective))


@examples("schedules", 15)
@given(jobs(), st.integers(0, 10**6))
def test_moves_lead_to_valid_orders_only(job: tuple[int, int, PipelineCosts], seed: int) -> None:
    """A search never gets worse, and its result passes the checker."""
    n, m, costs = job
    orders = VOrders(n, m, costs)
    start = GreedyOrder(orders, in_turn(n, m)).make()
    for objective in ALL:
        search = LocalSearch(orders, objective, start, Random(seed))
        before = search.value
        for _ in range(100):
            search.move()
        report = check_schedule(orders.schedule_of(search.order), costs)
        assert figure(report, objective) == search.value <= before


@examples("schedules", 15)
@given(jobs(), st.integers(0, 300))
def test_swapped_patterns_make_valid_orders_that_are_no_worse(
    job: tuple[int, int, PipelineCosts], moves: int
) -> None:
    """This holds for any costs and memory, and for few moves."""
    n, m, costs = job
    orders = VOrders(n, m, costs)
    start = GreedyOrder(orders, in_turn(n, m)).make()
    before = check_schedule(orders.schedule_of(start), costs)
    for objective in ALL:
        order, left = swapped_patterns(orders, objective, start, moves)
        assert 0 <= left <= moves
        report = check_schedule(orders.schedule_of(order), costs)
        assert figure(report, objective) <= figure(before, objective) * (1 + 1e-9)


def test_single_passes_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On uneven stages the search reaches the best known order without swapped patterns."""
    monkeypatch.setattr(v_planner, "_PATTERN_PASSES", 0)
    forward = (30, 10, 30, 10)
    costs = PipelineCosts(forward, forward, [0.7 * time for time in forward], 2)
    assert plan_v_schedule(2, 4, costs, effort=0.1).value <= 464


def test_plans_of_one_seed_are_equal() -> None:
    """This holds for any running time: the search counts its moves."""
    plans = [plan_v_schedule(4, 4, PUBLISHED[2].costs, effort=0.02, seed=1) for _ in range(2)]
    assert plans[0] == plans[1]


def test_steps_back_to_back_are_best_in_their_period() -> None:
    """On uneven stages a light rank idles anyway: the largest bubble says little about a step.

    It is never longer than ZBV, or than the best makespan or bubble from the same starts.
    """
    draw, shorter = Random(0), 0
    for _ in range(4):
        n = draw.choice((2, 4))
        forward = [10 * draw.choice((1, 1, 1, 2, 3)) for _ in range(2 * n)]
        costs = PipelineCosts(
            forward, [1.3 * one for one in forward], [0.7 * one for one in forward], 0.2
        )
        periods = {}
        for objective in ALL:
            plan = plan_v_schedule(n, 2 * n, costs, objective=objective, effort=0.02)
            periods[objective] = check_schedule(plan.schedule, costs).period
            assert plan.is_optimal or objective == "bubble"  # the last one's by moves alone
            if objective == "period":
                assert math.isclose(plan.value, periods[objective], rel_tol=1e-9)
        zbv = check_schedule(torch_schedule("zbv", n, 2 * n), costs).period
        assert periods["period"] <= zbv * (1 + 1e-9)
        shorter += periods["period"] < periods["bubble"]
    assert shorter
