"""The planner of zero-bubble V schedules: known orders, improved by local search.

The planner starts from the published order, torch's ZBV, building blocks and greedy orders, and
improves the best of them by patterns (``v_patterns``). A local search then moves one entry of a
rank at a time. It accepts a move if the result is no worse than the present order, or than the
order some moves ago (late acceptance: E. K. Burke and Y. Bykov, "The late acceptance hill-climbing
heuristic", 2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
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
from swpipe.plans.pipeline_parallel.v_blocks import uniform_orders
from swpipe.plans.pipeline_parallel.v_order import Objective, Order, VOrders, lower_bound
from swpipe.plans.pipeline_parallel.v_patterns import swapped_patterns
from swpipe.plans.pipeline_parallel.v_starts import GreedyOrder, published_order, torch_order

# The search is limited by the passes that it times, not by seconds: the same arguments give the
# same schedule on every machine.
_PASSES = 20_000_000
"""The number of passes to time with effort 1, which takes some seconds for jobs of any size."""

_UNIFORM_PASSES = 60_000
"""The number of passes of the orders of uniform blocks to try with any effort."""

_LEAST_UNIFORM = 8
"""The least number of these orders."""

_MOST_UNIFORM = 100
"""The largest number of these orders."""

_PATTERN_PASSES = 3_000_000
"""The number of passes to time in orders with swapped patterns with any effort, about 1 s."""

_SWAPPED = 12
"""The number of best starts in which patterns are swapped."""

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
    costs.require(2 * n_stage)
    if objective not in get_args(Objective):
        raise ScheduleError(f"objective is {shown(objective)}: give makespan, period or bubble")
    if not is_positive(effort):
        raise ScheduleError(f"effort is {shown(effort)}: give a number above 0")
    orders = VOrders(n_stage, n_micro, costs)
    # One microbatch after the other needs the least memory. If even this order exceeds max_mem, the
    # checker says where.
    in_turn = [[0, 1, 2, 4, 3, 5] * n_micro for _ in range(n_stage)]
    check_schedule(orders.schedule_of(in_turn), costs)
    n_passes = 6 * n_stage * n_micro
    first = published_order(orders)
    n_uniform = min(_MOST_UNIFORM, max(_LEAST_UNIFORM, _UNIFORM_PASSES // n_passes))
    uniform = islice(uniform_orders(orders), n_uniform)
    known = (first, torch_order(orders), in_turn, *uniform)
    given = [order for order in known if order is not None and orders.fits(order)]
    greedy = (GreedyOrder(orders, o, eager=eager).make() for o in given for eager in (False, True))
    starts = [*given, *filter(orders.fits, greedy)]
    # Starts of equal values are mostly the same order.
    by_value = {orders.value(start, objective): start for start in starts}
    best = [by_value[value] for value in sorted(by_value)[:_SWAPPED]]
    bound = lower_bound(orders, objective)
    swaps = 0 if is_at(min(by_value)[0], bound) else _PATTERN_PASSES // n_passes
    for place, start in enumerate(best):
        best[place], swaps = swapped_patterns(orders, objective, start, swaps)
    order = min(best, key=lambda order: orders.value(order, objective))
    search = LocalSearch(orders, objective, order, Random(seed))
    for _ in range(math.ceil(effort * _PASSES / n_passes)):
        if is_at(search.value, bound):
            break
        search.move()
    schedule = orders.schedule_of(search.order)
    value = _checked(schedule, costs, objective, search.value)
    # The search knows no pairs: they are joined afterwards.
    if costs.pair is not None:
        starts_of_pairs = [schedule, *_dual_pipe(orders)]
        paired = [pair_passes(start, costs, objective) for start in starts_of_pairs]
        value, schedule = min(paired, key=lambda pair: pair[0])
    published = orders.value(first, objective)[0] if first in given else None
    return VPlan(schedule, objective, value, bound, published)


def _checked(
    schedule: PipelineSchedule, costs: PipelineCosts, objective: Objective, value: float
) -> float:
    """Return the value of a schedule, after the checker has confirmed it.

    Raises:
        InternalError: The checker, which shares no code with the search, gets another value.
    """
    report = check_schedule(schedule, costs)
    # The objectives have the names of the report's properties.
    checked: float = getattr(report, objective)
    if not math.isclose(checked, value, rel_tol=1e-9, abs_tol=1e-9 * report.makespan):
        raise InternalError(f"a schedule has the {objective} {checked}, not {value}")
    return value


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
        order: The order to start from, which can run.
        rng: The random generator of the moves.

    Attributes:
        order: The best order so far.
        value: The value of the objective for this order.
    """

    def __init__(self, orders: VOrders, objective: Objective, order: Order, rng: Random) -> None:
        self.orders = orders
        self.objective = objective
        self.rng = rng
        self.order = order
        self.value, self._energy = self._valued(order)
        self._present = order
        # The energies of the last orders, at first all that of the start.
        self._history = [self._energy] * _HISTORY
        self._moves = 0

    def _valued(self, order: Order) -> tuple[float, float]:
        """Return the value of an order, and its energy, by which orders are accepted."""
        # Most moves change a rank that is not the worst, so that the maximum alone stays equal.
        value, total = self.orders.value(order, self.objective)
        return value, value + _SHARE * total / self.orders.n_ranks

    def move(self) -> None:
        """Try one random move, and accept or reject it."""
        # A ring buffer: the entry at this place is _HISTORY moves old.
        place = self._moves % _HISTORY
        self._moves += 1
        changed = self._drawn()
        if changed is not None:
            value, energy = self._valued(changed)
            if energy <= max(self._energy, self._history[place]):
                self._present = changed
                self._energy = energy
                if value < self.value:
                    self.order = changed
                    self.value = value
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
