"""The orders of a V from which a search starts: published, torch's, and greedy orders.

A greedy order is made in the order of time. Each rank runs the pass that can start first, and W
passes while it waits. It runs F0 and F1 only if the memory suffices for the rest of a microbatch,
counting the memory that pending W passes will free. Therefore the oldest microbatch can always
proceed: when its F1 is due, everything older has run and is freed, and the memory that was left
after its last F0 is available. It follows that there is a greedy order for every ``max_mem`` in
which one microbatch can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
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
    """Yield orders without end: the published method's for varied costs, and greedy orders."""
    # The first order is greedy: it exists for every memory in which one microbatch can run.
    yield GreedyOrder(orders, GreedyRules.plain(orders)).make()
    graph = _published(orders)
    f = graph.f_cost
    ways = [(True, True), (True, False), (False, True), (False, False)]
    hops = (orders.hop, *(f * hop for hop in _HOPS))
    tries = list(product([(f * a, f * b, f * w) for a, b, w in _RATIOS], hops, ways))
    tries += list(product([graph.costs], hops, ways))
    rng.shuffle(tries)
    for costs, hop, way in chain(tries, _drawn(f, ways, rng)):
        other = replace(graph, f_cost=costs[0], b_cost=costs[1], w_cost=costs[2], c_cost=hop)
        with suppress(ScheduleError):  # the published method may find no order in this memory
            yield _order_of(other.try_v_schedule(*way))
        yield GreedyOrder(orders, GreedyRules.drawn(orders, rng)).make()


def _drawn(
    f: float, ways: list[tuple[bool, bool]], rng: Random
) -> Iterator[tuple[tuple[float, float, float], float, tuple[bool, bool]]]:
    while True:
        costs = (f, f * rng.uniform(0.4, 2.5), f * rng.uniform(0.2, 1.5))
        yield costs, f * 10 ** rng.uniform(-3, -0.2), rng.choice(ways)


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


@dataclass(frozen=True, slots=True)
class GreedyRules:
    """The rules by which each rank chooses its next pass.

    Attributes:
        preference: The kinds 0 to 3, in the order of preference among passes with equal starts.
        lead: The largest number of microbatches between F0 and I1, by rank.
        slack: The time by which a W pass may delay another pass.
    """

    preference: tuple[int, ...]
    lead: tuple[int, ...]
    slack: float

    @classmethod
    def plain(cls, orders: VOrders) -> GreedyRules:
        """Return rules that prefer backward passes, and limit the lead only by memory."""
        return cls((2, 3, 1, 0), (orders.n_micro,) * orders.n_ranks, 0)

    @classmethod
    def drawn(cls, orders: VOrders, rng: Random) -> GreedyRules:
        """Return random rules."""
        n = orders.n_ranks
        backward = [2, 3] if rng.random() < 0.5 else [3, 2]
        preference = [*backward, 1, 0] if rng.random() < 0.7 else [1, *backward, 0]
        base = rng.uniform(1, 2 * n)
        slope = rng.uniform(-1, 2)
        lead = tuple(max(1, round(base + slope * (n - 1 - rank))) for rank in range(n))
        slack = rng.choice((0, 0.25, 0.5, 1)) * min(cost[4] for cost in orders.cost)
        return cls(tuple(preference), lead, slack)


class GreedyOrder:
    """An unfinished greedy order.

    Args:
        orders: The job.
        rules: The rules by which each rank chooses its next pass.
    """

    def __init__(self, orders: VOrders, rules: GreedyRules) -> None:
        n = orders.n_ranks
        self.orders = orders
        self.rules = rules
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
            _, rank, kind = min(one for one in next_of if one is not None)
            self._append(rank, kind)
            for near in (rank - 1, rank, rank + 1):
                if 0 <= near < n:
                    next_of[near] = self._next(near)
        return self.rows

    def _append(self, rank: int, kind: int) -> None:
        start = max(self.clock[rank], self._arrival(rank, kind) or 0)
        self.clock[rank] = end = start + self.orders.cost[rank][kind]
        self.ends[rank][kind].append(end)
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
        best: tuple[float, int, int] | None = None
        for place, kind in enumerate(self.rules.preference):
            if not self._is_due(rank, kind):
                continue
            arrival = self._arrival(rank, kind)
            if arrival is not None:
                best = min(best or (float("inf"), 0, 0), (max(clock, arrival), place, kind))
        if weight is not None:
            # W runs if it ends before the next pass can start, or if the next pass lacks memory. It
            # may delay by ``slack`` only a pass that has to wait in any case.
            fits = best is None or clock + orders.cost[rank][weight] <= best[0] + (
                self.rules.slack if best[0] > clock else 0
            )
            full = best is not None and self._left(rank) < orders.memory[rank][best[2]]
            if fits or full:
                return clock, rank, weight
        return None if best is None else (best[0], rank, best[2])

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
        if kind == 0 and done - len(own[3]) >= self.rules.lead[rank]:
            return False
        _, of_f1, of_i0, of_i1, *freed = memory = orders.memory[rank]
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
