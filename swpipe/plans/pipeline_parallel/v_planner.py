"""Plan a zero-bubble V: published, torch's and greedy orders, improved by local search.

A search moves one entry of a rank at a time. A move is taken if the result is no worse than the
present order, or than the one some moves ago (late acceptance: E. K. Burke and Y. Bykov, "The late
acceptance hill-climbing heuristic", 2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import get_args

from swpipe.core.messages import shown
from swpipe.errors import InternalError
from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pair_search import pair_passes
from swpipe.plans.pipeline_parallel.pipeline_costs import (
    PipelineCosts,
    is_positive,
    require_counts,
)
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import check_schedule
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_blocks import block_orders, uniform_orders
from swpipe.plans.pipeline_parallel.v_order import (
    Objective,
    Order,
    OrderTimes,
    VOrders,
    lower_bound,
)
from swpipe.plans.pipeline_parallel.v_starts import published_order, starts, torch_order

_PASSES = 20_000_000
"""Passes in the orders of a search with effort 1: some seconds, whatever the size."""

_START_MOVES = 35
"""Moves that take as long as making one start."""

_STARTS = 0.4
"""The share of the moves in place of which starts are tried."""

_MOST_STARTS = 400

_FIRST_UNIFORM = 8
"""How many uniform blocks are tried whatever the effort."""

_SEARCHES = 6
"""How many of the best starts are searched from, in turns."""

_TURN = 50
"""Moves in one turn of a search."""

_PATIENCE = 3000
"""Moves without a better order after which a search makes room for another start."""

_HISTORY = 50
"""How many moves ago the order was that a new one is compared with."""

_MEAN_DISTANCE = 4
"""How far an entry is moved, on average."""

_SHARE = 0.1
"""The weight of the mean over the ranks beside the maximum: it leads over plateaus."""


@dataclass(frozen=True, slots=True)
class VPlan:
    """A schedule for a V, from ``plan_v_schedule``; times in the unit of the costs.

    Attributes:
        schedule: The best schedule found.
        objective: What it is best in: "makespan", "period" or "bubble".
        value: Its makespan, its period, or its largest bubble.
        lower_bound: No schedule has a smaller value.
        published: The value of the published method; None where it finds no schedule in the memory.
    """

    schedule: PipelineSchedule
    objective: Objective
    value: float
    lower_bound: float
    published: float | None

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule is proved to be the best."""
        return is_at(self.value, self.lower_bound)


def is_at(value: float, bound: float) -> bool:
    """Whether a value has reached its lower bound, but for the rounding of floats."""
    return value <= bound or math.isclose(value, bound, rel_tol=1e-9)


def plan_v_schedule(
    n_stage: int,
    n_micro: int,
    costs: PipelineCosts,
    *,
    objective: Objective = "makespan",
    effort: float = 1.0,
    seed: int = 0,
) -> VPlan:
    """Plan a schedule of two chunks per rank, in a V.

    It is never worse than the published method, which is ``PipelineGraph``, or than torch's ZBV
    where that fits the memory.

    Args:
        n_stage: The number of ranks: stages in the sense of ``PipelineGraph``.
        n_micro: The number of microbatches.
        costs: What the passes cost. Every ``max_mem`` in which one microbatch can run has a
            schedule: 2 * f_mem, where nothing is computed once more.
        objective: "makespan": the step's time where a collective joins the ranks between steps,
            such as the clipping of gradients. "period": the time of a step where no collective
            does, which is the most that a rank works and idles between its first start and its
            last end. "bubble": the largest idle time alone, as published figures have it.
        effort: How many moves to try, if the lower bound is not reached before: those of 1 take
            about 5 s, whatever the size. The published method and torch's order are tried in any
            case. Moves are counted, so that the same arguments give the same schedule.
        seed: Of the search.

    Raises:
        ScheduleError: A size or cost makes no sense, or ``max_mem`` is too small.
    """
    require_counts({"n_stage": n_stage, "n_micro": n_micro})
    costs.require(n_stage, 2 * n_stage)
    costs.require_room(n_stage)
    if objective not in get_args(Objective):
        raise ScheduleError(f"objective is {shown(objective)}: makespan, period or bubble")
    if not is_positive(effort):
        raise ScheduleError(f"effort is {shown(effort)}: a number above 0")
    orders = VOrders(n_stage, n_micro, costs)
    pool = _Pool(orders, objective, Random(seed))
    published = pool.add(published_order(orders))
    uniform = uniform_orders(orders)
    first_uniform = islice(uniform, _FIRST_UNIFORM)
    for known in (torch_order(orders), *block_orders(n_stage, n_micro), *first_uniform):
        pool.add(known)
    further = chain(uniform, starts(orders, pool.rng))
    if not pool.found:
        pool.add(next(further))
    pool.checked(costs)
    moves = math.ceil(effort * _PASSES / (6 * n_stage * n_micro))
    for order in islice(further, min(_MOST_STARTS, int(_STARTS * moves / _START_MOVES))):
        if pool.is_at_bound:
            break
        pool.add(order)
        moves -= _START_MOVES
    pool.improve(further, moves)
    found, value = pool.checked(costs), pool.value
    if costs.pair is not None:
        starting = [found, *_dual_pipe(orders)]
        paired = [pair_passes(schedule, costs, objective) for schedule in starting]
        value, found = min(paired, key=lambda one: one[0])
    return VPlan(found, objective, value, pool.bound, published)


def _dual_pipe(orders: VOrders) -> list[PipelineSchedule]:
    """DualPipe-V, an order that is made for pairs; none where torch or the memory has no such."""
    try:
        schedule = torch_schedule("dualpipev", orders.n_ranks, orders.n_micro)
        check_schedule(schedule, orders.costs)
    except (ImportError, ScheduleError):
        return []
    return [schedule]


class LocalSearch:
    """A search from one order.

    Attributes:
        order: The best order so far.
        value: Its makespan, period, or largest bubble.
        idle_moves: Moves since it was found.
    """

    def __init__(self, orders: VOrders, objective: Objective, order: Order, rng: Random) -> None:
        self.orders, self.objective, self.rng = orders, objective, rng
        times = orders.times(order)
        if times is None:
            raise ValueError("a search starts from an order that can run")
        self.order, self.value = order, times.value(objective)
        self._present, self._energy = order, self._energy_of(times)
        self._history = [self._energy] * _HISTORY
        self._moves = self.idle_moves = 0

    def _energy_of(self, times: OrderTimes) -> float:
        values = times.values(self.objective)
        return max(values) + _SHARE * sum(values) / len(values)

    def move(self) -> None:
        """Try one move."""
        changed = self._drawn()
        times = None if changed is None else self.orders.times(changed)
        place = self._moves % _HISTORY
        self._moves += 1
        self.idle_moves += 1
        if changed is not None and times is not None:
            energy = self._energy_of(times)
            if energy <= max(self._energy, self._history[place]):
                self._present, self._energy = changed, energy
                if times.value(self.objective) < self.value:
                    self.order, self.value = changed, times.value(self.objective)
                    self.idle_moves = 0
        self._history[place] = self._energy

    def _drawn(self) -> Order | None:
        """The present order with one entry moved; None if that is no other valid order."""
        rng, present = self.rng, self._present
        rank = rng.randrange(len(present))
        row = present[rank]
        source = rng.randrange(1, len(row))
        distance = 1 + int(rng.expovariate(1 / _MEAN_DISTANCE))
        target = source + distance * rng.choice((-1, 1))
        if not 1 <= target < len(row):
            return None
        moved = row.copy()
        moved.insert(target, moved.pop(source))
        if moved == row or not self.orders.is_valid(moved, rank):
            return None
        return [*present[:rank], moved, *present[rank + 1 :]]


class _Pool:
    """The orders found so far, and the searches from the best of them."""

    def __init__(self, orders: VOrders, objective: Objective, rng: Random) -> None:
        self.orders, self.objective, self.rng = orders, objective, rng
        self.bound = lower_bound(orders, objective)
        self.found: list[tuple[float, Order]] = []

    @property
    def value(self) -> float:
        """Of the best order."""
        return self.found[0][0]

    @property
    def is_at_bound(self) -> bool:
        """Whether nothing can be better."""
        return is_at(self.value, self.bound)

    def add(self, order: Order | None) -> float | None:
        """Time an order that fits the memory, and keep it if it is one of the best; its value."""
        times = None if order is None or not self.orders.fits(order) else self.orders.times(order)
        if order is None or times is None:
            return None
        value = times.value(self.objective)
        if all(order != other for _, other in self.found):
            self.found = sorted([*self.found, (value, order)], key=lambda one: one[0])[:_SEARCHES]
        return value

    def improve(self, further: Iterator[Order], moves: int) -> None:
        """Search from each order in turns; one that gets no better makes room for another start."""
        searches = [self._search(order) for _, order in self.found]
        while True:
            for place, search in enumerate(searches):
                before = search.value
                for _ in range(_TURN):
                    if self.is_at_bound or moves <= 0:
                        return
                    search.move()
                    moves -= 1
                    if search.value < self.value:
                        self.found.insert(0, (search.value, search.order))
                if search.value == before and search.idle_moves >= _PATIENCE:
                    searches[place] = self._search(next(further))
                    moves -= _START_MOVES

    def _search(self, order: Order) -> LocalSearch:
        return LocalSearch(self.orders, self.objective, order, self.rng)

    def checked(self, costs: PipelineCosts) -> PipelineSchedule:
        """The best schedule, as the checker agrees, which shares no code with the search."""
        schedule = self.orders.schedule_of(self.found[0][1])
        report = check_schedule(schedule, costs)
        value: float = getattr(report, self.objective)
        if not math.isclose(value, self.value, rel_tol=1e-9, abs_tol=1e-9 * report.makespan):
            raise InternalError(f"a schedule has the {self.objective} {value}, not {self.value}")
        return schedule
