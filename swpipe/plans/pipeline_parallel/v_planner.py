"""The planner of zero-bubble V schedules: known orders, improved by local search.

The planner starts from the published order, torch's ZBV, building blocks and greedy orders, and
improves the best of them by patterns (``v_patterns``). A local search then moves one entry of a
rank at a time. It accepts a move if the result is no worse than the present order, or than the
order some moves ago (late acceptance: E. K. Burke and Y. Bykov, "The late acceptance hill-climbing
heuristic", 2017).
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
from swpipe.plans.pipeline_parallel.v_patterns import swapped_patterns
from swpipe.plans.pipeline_parallel.v_starts import (
    GreedyOrder,
    published_order,
    starts,
    torch_order,
)

# The search is limited by the passes that it times, not by seconds: the same arguments give the
# same schedule on every machine.
_PASSES = 20_000_000
"""The number of passes to time with effort 1, which takes some seconds for jobs of any size."""

_START_MOVES = 35
"""The number of moves that take as long as making one start."""

_STARTS = 0.4
"""The share of the moves that is spent on starts."""

_MOST_STARTS = 400

_UNIFORM_PASSES = 120_000
"""The number of passes of the orders of uniform blocks to try with any effort."""

_LEAST_UNIFORM = 8
"""The least number of these orders."""

_PATTERN_PASSES = 3_000_000
"""The number of passes to time in orders with swapped patterns with any effort, about 1 s."""

_SEARCHES = 6
"""The number of best starts from which to search, in alternation."""

_TURN = 50
"""The number of moves in one turn of a search."""

_PATIENCE = 2000
"""The number of moves without improvement after which another start replaces a search."""

_HISTORY = 50
"""The age in moves of the order with which late acceptance compares a new order."""

_MEAN_DISTANCE = 4
"""The mean distance of a move, in entries."""

_SHARE = 0.1
"""The weight of the mean over the ranks, which tells orders with equal maxima apart."""


@dataclass(frozen=True, slots=True)
class VPlan:
    """A schedule for a V from ``plan_v_schedule``, with times in the unit of the costs.

    Attributes:
        schedule: The best schedule that was found.
        objective: The objective: "makespan", "period" or "bubble".
        value: The value of the objective for the schedule.
        lower_bound: A lower bound of the value for all schedules.
        published: The value for the published method; None if this method finds no schedule within
            the memory.
    """

    schedule: PipelineSchedule
    objective: Objective
    value: float
    lower_bound: float
    published: float | None

    @property
    def is_optimal(self) -> bool:
        """Whether the value equals the lower bound, so that no schedule is better."""
        return is_at(self.value, self.lower_bound)


def is_at(value: float, bound: float) -> bool:
    """Return whether a value has reached its lower bound, up to the rounding of floats."""
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
    """Plan a schedule of two chunks per rank in a V.

    The schedule is at least as good as the published method's (``PipelineGraph``), and as torch's
    ZBV if that fits the memory.

    Args:
        n_stage: The number of ranks, which are the stages of ``PipelineGraph``.
        n_micro: The number of microbatches.
        costs: The costs of the passes. There is a schedule for every ``max_mem`` in which one
            microbatch can run: 2 * f_mem, if nothing is recomputed.
        objective: The value to minimize. "makespan" is the step time if a collective, for example
            gradient clipping, synchronizes the ranks between steps. "period" is the step time if
            no collective does: the longest time of a rank from its first start to its last end.
            "bubble" is the largest idle time of a rank, which publications report.
        effort: The amount of search, unless the lower bound is reached before; 1 takes about 5 s
            for jobs of any size. The published method and torch's order are always tried. The same
            arguments give the same schedule, since moves are counted instead of seconds.
        seed: The seed of the search.

    Raises:
        ScheduleError: A size or cost is invalid, or ``max_mem`` is too small.
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
    # The greedy order exists for every memory in which one microbatch can run.
    pool.add(GreedyOrder(orders).make())
    uniform = uniform_orders(orders)
    n_passes = 6 * n_stage * n_micro
    first_uniform = islice(uniform, max(_LEAST_UNIFORM, _UNIFORM_PASSES // n_passes))
    for order in (torch_order(orders), *block_orders(n_stage, n_micro), *first_uniform):
        if order is not None and pool.add(order) is not None:
            pool.add(GreedyOrder(orders, order).make())
    left = _PATTERN_PASSES // n_passes
    for _, start in pool.ranked:
        if not pool.is_at_bound:
            order, left = swapped_patterns(orders, objective, start, left)
            pool.add(order)
    further = chain(uniform, starts(orders, pool.rng))
    # An error of the search's arithmetic is found before the seconds that the search takes.
    pool.checked(costs)
    moves = math.ceil(effort * _PASSES / n_passes)
    for order in islice(further, min(_MOST_STARTS, int(_STARTS * moves / _START_MOVES))):
        if pool.is_at_bound:
            break
        pool.add(order)
        moves -= _START_MOVES
    pool.improve(further, moves)
    schedule = pool.checked(costs)
    value = pool.value
    # The search knows no pairs: they are joined afterwards.
    if costs.pair is not None:
        starts_of_pairs = [schedule, *_dual_pipe(orders)]
        paired = [pair_passes(start, costs, objective) for start in starts_of_pairs]
        value, schedule = min(paired, key=lambda pair: pair[0])
    return VPlan(schedule, objective, value, pool.bound, published)


def _dual_pipe(orders: VOrders) -> list[PipelineSchedule]:
    """Return DualPipe-V, an order made for pairs, or nothing if it does not exist or fit."""
    try:
        schedule = torch_schedule("dualpipev", orders.n_ranks, orders.n_micro)
        check_schedule(schedule, orders.costs)
    except ScheduleError:
        return []
    return [schedule]


class LocalSearch:
    """A local search from one order.

    Args:
        orders: The job.
        objective: The value to minimize.
        order: The order to start from.
        rng: The random generator of the moves.
        departs: Whether the first moves are accepted whatever they cost, to leave the neighbourhood
            of an order that a search could not improve.

    Attributes:
        order: The best order so far.
        value: The value of the objective for this order.
        idle_moves: The number of moves since this order was found.

    Raises:
        ValueError: The order deadlocks.
    """

    def __init__(
        self,
        orders: VOrders,
        objective: Objective,
        order: Order,
        rng: Random,
        *,
        departs: bool = False,
    ) -> None:
        self.orders = orders
        self.objective = objective
        self.rng = rng
        times = orders.times(order)
        if times is None:
            raise ValueError("a search starts from an order that can run")
        self.order = order
        self.value = times.value(objective)
        self._present = order
        self._energy = self._energy_of(times)
        # The energies of the last orders, at first all that of the start.
        self._history = [math.inf if departs else self._energy] * _HISTORY
        self._moves = 0
        self.idle_moves = 0

    def _energy_of(self, times: OrderTimes) -> float:
        # Most moves change a rank that is not the worst, so that the maximum alone stays equal.
        values = times.values(self.objective)
        return max(values) + _SHARE * sum(values) / len(values)

    def move(self) -> None:
        """Try one random move, and accept or reject it."""
        changed = self._drawn()
        times = None if changed is None else self.orders.times(changed)
        # A ring buffer: the entry at this place is _HISTORY moves old.
        place = self._moves % _HISTORY
        self._moves += 1
        self.idle_moves += 1
        if changed is not None and times is not None:
            energy = self._energy_of(times)
            if energy <= max(self._energy, self._history[place]):
                self._present = changed
                self._energy = energy
                if times.value(self.objective) < self.value:
                    self.order = changed
                    self.value = times.value(self.objective)
                    self.idle_moves = 0
        self._history[place] = self._energy

    def _drawn(self) -> Order | None:
        """Return the present order with one random entry moved; None if it is invalid or equal."""
        rng = self.rng
        present = self._present
        rank = rng.randrange(len(present))
        row = present[rank]
        # The first entry stays: nothing can come before the first F0.
        source = rng.randrange(1, len(row))
        distance = 1 + int(rng.expovariate(1 / _MEAN_DISTANCE))
        target = source + distance * rng.choice((-1, 1))
        if not 1 <= target < len(row):
            return None
        moved = row.copy()
        moved.insert(target, moved.pop(source))
        # Entries of one kind are interchangeable: moving past equal entries changes nothing.
        if moved == row or not self.orders.is_valid(moved, rank):
            return None
        return [*present[:rank], moved, *present[rank + 1 :]]


class _Pool:
    """The best orders that were found so far, best first, and the searches from them."""

    def __init__(self, orders: VOrders, objective: Objective, rng: Random) -> None:
        self.orders = orders
        self.objective = objective
        self.rng = rng
        self.bound = lower_bound(orders, objective)
        self.ranked: list[tuple[float, Order]] = []

    @property
    def value(self) -> float:
        """The value of the best order."""
        return self.ranked[0][0]

    @property
    def is_at_bound(self) -> bool:
        """Whether the best order has reached the lower bound."""
        return is_at(self.value, self.bound)

    def add(self, order: Order | None) -> float | None:
        """Keep an order if it is one of the best, and return its value; None if it cannot run."""
        times = None if order is None or not self.orders.fits(order) else self.orders.times(order)
        if order is None or times is None:
            return None
        value = times.value(self.objective)
        # Two searches from the same order would waste one of few places.
        if all(order != other for _, other in self.ranked):
            ranked = sorted([*self.ranked, (value, order)], key=lambda entry: entry[0])
            self.ranked = ranked[:_SEARCHES]
        return value

    def improve(self, further: Iterator[Order], moves: int) -> None:
        """Search from all orders in alternation, and replace searches that no longer improve.

        Args:
            further: The starts that replace them; the best order does after the last of them.
            moves: The number of moves in all searches together.
        """
        # In alternation, because nobody knows in advance from which start a search gets furthest.
        searches = [
            LocalSearch(self.orders, self.objective, order, self.rng) for _, order in self.ranked
        ]
        while True:
            for place, search in enumerate(searches):
                before = search.value
                for _ in range(_TURN):
                    if self.is_at_bound or moves <= 0:
                        return
                    search.move()
                    moves -= 1
                    # The other places of the pool no longer matter: the searches have their orders.
                    if search.value < self.value:
                        self.ranked.insert(0, (search.value, search.order))
                if search.value == before and search.idle_moves >= _PATIENCE:
                    start = next(further, None)
                    searches[place] = LocalSearch(
                        self.orders,
                        self.objective,
                        self.ranked[0][1] if start is None else start,
                        self.rng,
                        departs=start is None,
                    )
                    moves -= _START_MOVES

    def checked(self, costs: PipelineCosts) -> PipelineSchedule:
        """Return the best schedule, after the checker has confirmed its value.

        Raises:
            InternalError: The checker, which shares no code with the search, gets another value.
        """
        schedule = self.orders.schedule_of(self.ranked[0][1])
        report = check_schedule(schedule, costs)
        # The objectives have the names of the report's properties.
        value: float = getattr(report, self.objective)
        if not math.isclose(value, self.value, rel_tol=1e-9, abs_tol=1e-9 * report.makespan):
            raise InternalError(f"a schedule has the {self.objective} {value}, not {self.value}")
        return schedule
