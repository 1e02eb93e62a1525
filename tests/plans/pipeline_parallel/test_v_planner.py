"""plan_v_schedule: never worse than the published method and torch, in any memory, in its time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    ScheduleError,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
    v_planner,
)
from swpipe.plans.pipeline_parallel.v_order import (
    Objective,
    Order,
    OrderTimes,
    VOrders,
    lower_bound,
)
from swpipe.plans.pipeline_parallel.v_planner import LocalSearch
from swpipe.plans.pipeline_parallel.v_starts import GreedyOrder, GreedyRules
from tests.plans.pipeline_parallel.zbv_figures import (
    MEMORY,
    OPTIMA,
    PUBLISHED,
    Optimum,
    Published,
)
from tests.support.optimum import least_value

OBJECTIVES: tuple[Objective, ...] = ("makespan", "bubble")


def name(row: tuple[int, ...]) -> str:
    """The configuration of a row."""
    return "-".join(map(str, row[:6]))


def figure(report: object, objective: Objective) -> float:
    """What the objective asks for."""
    return float(getattr(report, objective))


class StepClock:
    """A clock that advances by one step each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s = step_s, 0.0

    def monotonic(self) -> float:
        """The time, which has advanced."""
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are starts and moves, so that a plan does not depend on the machine's speed."""
    monkeypatch.setattr(v_planner, "time", StepClock(1.0))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("row", [PUBLISHED[11], PUBLISHED[12], PUBLISHED[25]], ids=name)
def test_plan_is_no_worse_than_published_and_torch(row: Published, objective: Objective) -> None:
    """And its makespan is strictly less, where the published one is not a lower bound."""
    plan = plan_v_schedule(row.n, row.m, row.costs, objective=objective, seconds=60)
    published = {"makespan": row.makespan, "bubble": row.bubble}[objective]
    least = {"makespan": row.least_makespan, "bubble": row.least_bubble}[objective]
    torch = figure(check_schedule(torch_schedule("zbv", row.n, row.m), row.costs), objective)
    assert (plan.published, plan.lower_bound) == (published, least)
    assert figure(check_schedule(plan.schedule, row.costs), objective) == plan.value
    assert least <= plan.value <= min(published, torch)
    if objective == "makespan" and published > least:
        assert plan.value < published


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("row", OPTIMA, ids=name)
def test_proved_optima_are_reached(row: Optimum, objective: Objective) -> None:
    """About half of the bubbles are below the published figure."""
    best = {"makespan": row.best_makespan, "bubble": row.best_bubble}[objective]
    plan = plan_v_schedule(row.n, row.m, row.costs, objective=objective, seconds=300)
    assert plan.value == best
    assert plan.is_optimal == (plan.lower_bound == best)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_optima_are_those_of_a_solver(objective: Objective) -> None:
    """One of them; the others were proved in the same way."""
    row = OPTIMA[11]
    best = {"makespan": row.best_makespan, "bubble": row.best_bubble}[objective]
    assert least_value(VOrders(row.n, row.m, row.costs), objective, best + 1000) == best


ONE_MICROBATCH = [
    [0, 1, 2, *rest] for rest in itertools.permutations((3, 4, 5)) if rest.index(3) < rest.index(5)
]
"""All orders of a rank with one microbatch."""


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "costs",
    [
        PipelineCosts(3, 5, 7, 2),
        PipelineCosts((3, 1, 4), (1, 5, 9), (2, 6, 5), 3),
        PipelineCosts(1, (0.5, 2.25, 1, 1.7, 3, 0.1), (9, 1, 1, 1, 1, 4), 0.3, 3, -1, -2, 6),
    ],
)
def test_a_plan_is_the_best_of_all_orders(costs: PipelineCosts, objective: Objective) -> None:
    """Costs by rank and by stage, integers or not; every order of three ranks is timed."""
    orders = VOrders(3, 1, costs)
    every = (orders.times(list(rows)) for rows in itertools.product(ONE_MICROBATCH, repeat=3))
    best = min(times.value(objective) for times in every if times is not None)
    plan = plan_v_schedule(3, 1, costs, objective=objective, seconds=300)
    assert plan.lower_bound <= best + 1e-9
    assert plan.value == pytest.approx(best, abs=1e-9)


def test_torch_order_is_tried_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is left for other starts, the plan is as good as torch's order all the same."""
    monkeypatch.setattr(v_planner, "time", StepClock(1.0))
    row = next(r for r in PUBLISHED if r.torch_bubble < r.bubble)
    plan = plan_v_schedule(row.n, row.m, row.costs, objective="bubble", seconds=0.5)
    assert (plan.value, plan.published) == (row.torch_bubble, row.bubble)


def test_seconds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is looked at after each start and each move, however long they take."""
    clock = StepClock(0)
    monkeypatch.setattr(v_planner, "time", clock)

    class SlowSearch(LocalSearch):
        """A search whose moves take 50 ms."""

        def move(self) -> None:
            clock.now_s += 0.05
            super().move()

    class SlowOrders(VOrders):
        """Orders that are timed in 50 ms, by searches that begin as well."""

        def times(self, order: Order) -> OrderTimes | None:
            clock.now_s += 0.05
            return super().times(order)

    monkeypatch.setattr(v_planner, "LocalSearch", SlowSearch)
    monkeypatch.setattr(v_planner, "VOrders", SlowOrders)
    plan_v_schedule(4, 8, PUBLISHED[17].costs, objective="bubble", seconds=10)
    assert 9 < clock.now_s < 11


def test_a_plan_at_the_bound_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be better, so no more time is spent."""
    clock = StepClock(0.001)
    monkeypatch.setattr(v_planner, "time", clock)
    plan = plan_v_schedule(2, 4, PUBLISHED[4].costs, seconds=1000)
    assert plan.is_optimal
    assert clock.now_s < 0.1


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_memory_from_two_passes_on_has_a_schedule(n: int) -> None:
    """2 f, 3 f, n f, 1.5 n f; few microbatches and many."""
    f = MEMORY[0]
    for m, limit in itertools.product((1, 2, n, 3 * n), {2 * f, 3 * f, n * f, 1.5 * n * f}):
        if limit >= 2 * f:
            costs = PipelineCosts(1000, 1500, 500, 300, *MEMORY, limit)
            plan = plan_v_schedule(n, m, costs, seconds=0.01)
            assert max(check_schedule(plan.schedule, costs).peak_memory) <= limit


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_stage": 0}, "n_stage is 0"),
        ({"n_micro": 0}, "n_micro is 0"),
        ({"objective": "time"}, "objective is 'time': makespan or bubble"),
        ({"seconds": 0}, "seconds is 0"),
        ({"costs": PipelineCosts(f_mem=2, max_mem=3.9)}, r"max_mem is 3.9: .* 2 \* f_mem = 4"),
        ({"costs": PipelineCosts(forward=(1, 1, 1))}, "forward has 3 numbers"),
    ],
)
def test_what_has_no_plan_is_refused(changes: dict[str, object], match: str) -> None:
    """In one line, before anything is planned."""
    arguments = {"n_stage": 2, "n_micro": 2, "costs": PipelineCosts()} | changes
    with pytest.raises(ScheduleError, match=match) as caught:
        plan_v_schedule(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, PipelineCosts]:
    """Ranks, microbatches, and costs that may differ by rank or stage, in little memory or much."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    one = st.integers(1, 30)
    times = st.one_of(
        one,
        st.lists(one, min_size=n, max_size=n),
        st.lists(one, min_size=2 * n, max_size=2 * n),
    )
    f = draw(st.integers(2, 9))
    b = draw(st.integers(-f, 0))
    w = -f - b - draw(st.integers(0, 2))
    limit = draw(st.one_of(st.none(), st.integers(2 * f, 3 * n * f)))
    unit = draw(st.sampled_from((1, 0.1)))  # sums of floats are a little off
    memory = (f * unit, b * unit, w * unit)
    limit = limit and limit * unit
    return n, m, PipelineCosts(*(draw(times) for _ in range(3)), draw(one), *memory, limit)


@given(jobs(), st.integers(0, 10**6))
def test_greedy_orders_are_valid_and_timed_like_the_checker(
    job: tuple[int, int, PipelineCosts], seed: int
) -> None:
    """Whatever the costs, the memory and the rules; no order is below the lower bounds."""
    n, m, costs = job
    orders, rng = VOrders(n, m, costs), Random(seed)
    for rules in (GreedyRules.plain(orders), GreedyRules.drawn(orders, rng)):
        order = GreedyOrder(orders, rules).make()
        schedule = orders.schedule_of(order)
        report, times = check_schedule(schedule, costs), orders.times(order)
        assert times is not None
        assert times.value("makespan") == report.makespan
        assert tuple(times.bubbles) == report.bubbles
        assert all(map(orders.is_valid, order))
        assert orders.order_of(schedule) == order
        for objective in OBJECTIVES:
            assert lower_bound(orders, objective) <= times.value(objective)


@settings(max_examples=30)
@given(jobs(), st.integers(0, 10**6))
def test_moves_lead_to_valid_orders_only(job: tuple[int, int, PipelineCosts], seed: int) -> None:
    """A search never gets worse, and what it finds passes the checker."""
    n, m, costs = job
    orders = VOrders(n, m, costs)
    start = GreedyOrder(orders, GreedyRules.plain(orders)).make()
    for objective in OBJECTIVES:
        search = LocalSearch(orders, objective, start, Random(seed))
        before = search.value
        for _ in range(100):
            search.move()
        report = check_schedule(orders.schedule_of(search.order), costs)
        assert figure(report, objective) == search.value <= before


def test_plans_of_one_seed_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same number of moves, a seed gives the same schedule."""
    plans = []
    for _ in range(2):
        monkeypatch.setattr(v_planner, "time", StepClock(0.001))
        plans.append(plan_v_schedule(8, 8, PUBLISHED[25].costs, seconds=0.5, seed=1))
    assert plans[0] == plans[1]


def test_memory_may_have_no_limit_and_links_no_latency() -> None:
    """An infinite ``max_mem`` is a limit that is never reached; a hop of 0 costs nothing."""
    costs = PipelineCosts(1, 2, 1, hop=0, max_mem=math.inf)
    plan = plan_v_schedule(2, 4, costs, seconds=0.1)
    least = plan_v_schedule(2, 4, replace(costs, max_mem=1e6), seconds=0.1)
    assert plan.lower_bound == least.lower_bound <= plan.value
