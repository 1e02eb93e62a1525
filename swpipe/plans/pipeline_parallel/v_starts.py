"""The orders of a V from which a search starts: published, torch's, and greedy orders.

A greedy order is made in the order of time. Each rank runs the pass that can start first, backward
passes before others, and W passes while it waits or lacks memory. It runs F0 and F1 only if the
memory suffices for the rest of a microbatch, counting the memory that pending W passes will free.
Therefore the oldest microbatch can always proceed: when its F1 is due, everything older has run and
is freed, and the memory that was left after its last F0 is available. It follows that there is a
greedy order for every ``max_mem`` in which one microbatch can run. The W of other orders can be
placed by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random

from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_graph import AttemptResult, PipelineGraph
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_order import NEEDS, Order, VOrders

_RATIOS = (
    (1, 1.2, 0.8),
    (1, 0.8, 1.2),
    (1, 1, 1),
    (1, 1, 0.5),
    (1, 0.5, 1),
    (1, 1.5, 0.5),
    (1, 2, 1),
)
"""The times of F, B and W with which the published method is restarted, in units of F."""

_HOPS = (0.001, 0.05, 0.4)
"""The latencies with which the published method is restarted, in units of F."""


def published_order(orders: VOrders) -> Order | None:
    """Return the order of the published method; None if it finds no order within the memory."""
    try:
        return _order_of(_published(orders).best_attempt())
    except ScheduleError:
        return None


def torch_order(orders: VOrders) -> Order | None:
    """Return the order of torch's ZBV, whatever memory it needs; None if torch lacks it."""
    try:
        return orders.order_of(torch_schedule("zbv", orders.n_ranks, orders.n_micro))
    except ScheduleError:
        return None


def starts(orders: VOrders, rng: Random) -> Iterator[Order]:
    """Yield the published method's orders for varied costs."""
    graph = _published(orders)
    f = graph.f_cost
    ways = [(True, True), (True, False), (False, True), (False, False)]
    hops = (orders.hop, *(f * hop for hop in _HOPS))
    costs = [graph.costs, *((f * a, f * b, f * w) for a, b, w in _RATIOS)]
    attempts = [*product(costs, hops, ways)]
    rng.shuffle(attempts)
    for (f_cost, b_cost, w_cost), hop, way in attempts:
        other = replace(graph, f_cost=f_cost, b_cost=b_cost, w_cost=w_cost, c_cost=hop)
        with suppress(ScheduleError):  # the published method may find no order in this memory
            yield _order_of(other.try_v_schedule(*way))


def _published(orders: VOrders) -> PipelineGraph:
    """Return the published method's generator, with the mean costs of all ranks and chunks."""

    # The method has one number for each op.
    def means(rows: list[list[float]]) -> Iterator[float]:
        # Equal numbers are not summed, so that they keep their type and are not rounded.
        for kind in (0, 2, 4):
            both = [row[kind] + row[kind + 1] for row in rows]
            yield (both[0] if len(set(both)) == 1 else sum(both) / len(both)) / 2

    (f_cost, b_cost, w_cost), (f, b, w) = means(orders.cost), means(orders.memory)
    # The limit must suffice for the mean costs, or the generator is refused. The order is checked
    # with the true costs later, and may exceed the memory.
    memory = (f, b, w, max(orders.costs.limit(2 * orders.n_ranks), 2 * (f + max(0, b))))
    sizes = orders.n_ranks, orders.n_micro
    return PipelineGraph(*sizes, f_cost, b_cost, w_cost, orders.hop, *memory)


def _order_of(attempt: AttemptResult) -> Order:
    return [[2 * category + raw for category, raw, _ in row] for row in attempt.schedule]


class GreedyOrder:
    """An unfinished greedy order.

    Args:
        orders: The job.
        given: An order that can run, whose F and I keep their sequence on each rank, while W find
            other places; None to choose all passes.
    """

    def __init__(self, orders: VOrders, given: Order | None = None) -> None:
        n = orders.n_ranks
        self.orders = orders
        self.sequence = given and [[kind for kind in row if kind < 4] for row in given]
        self.ends: list[list[list[float]]] = [[[] for _ in range(6)] for _ in range(n)]
        self.clock: list[float] = [0] * n
        self.used: list[float] = [0] * n
        self.rows: Order = [[] for _ in range(n)]

    def make(self) -> Order:
        """Return the complete order."""
        # Events in the order of time: the rank whose next pass starts first runs it. This changes
        # only its own next pass and those of its neighbours.
        n = self.orders.n_ranks
        next_of = [self._next(rank) for rank in range(n)]
        for _ in range(6 * n * self.orders.n_micro):
            _, rank, kind = min(entry for entry in next_of if entry is not None)
            self._append(rank, kind)
            for near in (rank - 1, rank, rank + 1):
                if 0 <= near < n:
                    next_of[near] = self._next(near)
        return self.rows

    def _append(self, rank: int, kind: int) -> None:
        start = max(self.clock[rank], self._arrival(rank, kind) or 0)
        self.clock[rank] = start + self.orders.cost[rank][kind]
        self.ends[rank][kind].append(self.clock[rank])
        self.used[rank] += self.orders.memory[rank][kind]
        self.rows[rank].append(kind)

    def _arrival(self, rank: int, kind: int) -> float | None:
        """Return the time at which the input of a kind's next pass arrives; None if unknown yet."""
        if kind >= 4:
            return 0
        source = rank + 1 if kind % 2 else rank - 1
        if not 0 <= source < self.orders.n_ranks:
            return 0
        ends = self.ends[source][kind]
        micro = len(self.ends[rank][kind])
        return ends[micro] + self.orders.hop if micro < len(ends) else None

    def _next(self, rank: int) -> tuple[float, int, int] | None:
        """Return the start, rank and kind of a rank's next pass; None if no pass is ready."""
        orders = self.orders
        own = self.ends[rank]
        clock = self.clock[rank]
        pending = [kind for kind in (4, 5) if len(own[kind]) < len(own[kind - 2])]
        weight = min(pending, key=lambda kind: own[kind - 2][len(own[kind])], default=None)
        arrivals = [(self._arrival(rank, kind), kind) for kind in self._choices(rank)]
        # Of passes that can start at once, the first choice.
        best = min(
            (
                (max(clock, arrival), place, kind)
                for place, (arrival, kind) in enumerate(arrivals)
                if arrival is not None
            ),
            default=None,
        )
        if weight is not None and (
            best is None
            or clock + orders.cost[rank][weight] <= best[0]
            or self._left(rank) < orders.memory[rank][best[2]]
        ):
            return clock, rank, weight
        return None if best is None else (best[0], rank, best[2])

    def _choices(self, rank: int) -> list[int]:
        """Return the F and I that a rank may run next, in the order of preference."""
        if self.sequence is None:
            return [kind for kind in (2, 3, 1, 0) if self._is_due(rank, kind)]
        done = sum(map(len, self.ends[rank][:4]))
        return self.sequence[rank][done : done + 1]

    def _is_due(self, rank: int, kind: int) -> bool:
        """Return whether a rank may run a kind's next pass once its pending W have freed memory."""
        orders = self.orders
        own = self.ends[rank]
        done = len(own[kind])
        need = NEEDS[kind]
        if done >= (orders.n_micro if need is None else len(own[need])):
            return False
        if kind > 1:
            return True
        memory = orders.memory[rank]
        _, of_f1, of_i0, of_i1, *freed = memory
        # The memory that a microbatch still needs after its F0: F1 and then I0, or I1.
        rest = max(of_f1 + max(0, of_i0), of_i1)
        if kind == 1:
            # After F1 the microbatch needs less. If an older microbatch has still to run I1, the
            # memory of that I1 is needed as well.
            waits = len(own[2]) > len(own[3])
            rest = max(0, of_i0, of_i1) if waits else rest - of_f1
        pending = (len(own[k]) - len(own[k + 2]) for k in (2, 3))
        left = self._left(rank) - sum(n * w for n, w in zip(pending, freed, strict=True))
        return left >= memory[kind] + rest

    def _left(self, rank: int) -> float:
        return self.orders.room[rank] - self.used[rank]
