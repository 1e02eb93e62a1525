"""The orders of a V from which a search starts: published, torch's, and greedy orders.

A greedy order follows a given order, and is made in the order of time. Each rank runs the pass that
can start first: the next one of the given order, or a later one where the rank would wait, if the
memory suffices for the passes in between. W passes run while a rank waits or lacks memory.
Therefore the given order can always go on, and there is a greedy order for every order within the
memory: that of one microbatch after the other, for example.
"""

from __future__ import annotations

from itertools import chain
from statistics import mean

from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_graph import PipelineGraph
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_order import NEEDS, Order, VOrders


def published_order(orders: VOrders) -> Order | None:
    """Return the order of the published method; None if it finds no order within the memory."""
    # The method has one number for each op: the mean of all ranks and chunks. The order is checked
    # with the true costs later, and may exceed the memory.
    (f_cost, b_cost, w_cost), (f_mem, b_mem, w_mem) = (
        [mean(chain.from_iterable(row[kind : kind + 2] for row in rows)) for kind in (0, 2, 4)]
        for rows in (orders.cost, orders.memory)
    )
    sizes = (orders.n_ranks, orders.n_micro)
    times = (f_cost, b_cost, w_cost, orders.hop)
    memory = (f_mem, b_mem, w_mem, orders.costs.limit(2 * orders.n_ranks))
    try:
        attempt = PipelineGraph(*sizes, *times, *memory).best_attempt()
    except ScheduleError:
        return None
    return [[2 * category + raw for category, raw, _ in row] for row in attempt.schedule]


def torch_order(orders: VOrders) -> Order | None:
    """Return the order of torch's ZBV, whatever memory it needs; None if torch lacks it."""
    try:
        return orders.order_of(torch_schedule("zbv", orders.n_ranks, orders.n_micro))
    except ScheduleError:
        return None


class GreedyOrder:
    """An unfinished greedy order.

    Args:
        orders: The job.
        given: The order to follow, which fits the memory.
        eager: Whether passes that take memory may run before their place, too.
    """

    def __init__(self, orders: VOrders, given: Order, *, eager: bool = True) -> None:
        n = orders.n_ranks
        self.orders = orders
        self.eager = eager
        self.left = [[kind for kind in row if kind < 4] for row in given]
        self.ends: list[list[list[float]]] = [[[] for _ in range(6)] for _ in range(n)]
        self.clock: list[float] = [0] * n
        self.room = orders.room.copy()
        self.rows: Order = [[] for _ in range(n)]

    def make(self) -> Order:
        """Return the complete order."""
        # Events in the order of time: the rank whose next pass starts first runs it. This changes
        # only its own next pass and those of its neighbours.
        n = self.orders.n_ranks
        next_of = [self._next(rank) for rank in range(n)]
        for _ in range(6 * n * self.orders.n_micro):
            start, rank, kind = min(entry for entry in next_of if entry is not None)
            self.clock[rank] = start + self.orders.cost[rank][kind]
            self.ends[rank][kind].append(self.clock[rank])
            self.room[rank] -= self.orders.memory[rank][kind]
            self.rows[rank].append(kind)
            if kind < 4:
                self.left[rank].remove(kind)
            for near in (rank - 1, rank, rank + 1):
                if 0 <= near < n:
                    next_of[near] = self._next(near)
        return self.rows

    def _next(self, rank: int) -> tuple[float, int, int] | None:
        """Return the start, rank and kind of a rank's next pass; None if no pass is ready."""
        own = self.ends[rank]
        clock = self.clock[rank]
        # Of passes that can start at once, the first of the given order.
        arrivals = [(self._arrival(rank, kind), kind) for kind in self._choices(rank)]
        best = min(
            (
                (max(clock, arrival), place, kind)
                for place, (arrival, kind) in enumerate(arrivals)
                if arrival is not None
            ),
            default=None,
        )
        pending = [kind for kind in (4, 5) if len(own[kind]) < len(own[kind - 2])]
        weight = min(pending, key=lambda kind: own[kind - 2][len(own[kind])], default=None)
        if weight is not None and (
            best is None
            or clock + self.orders.cost[rank][weight] <= best[0]
            or self.room[rank] < self.orders.memory[rank][best[2]]
        ):
            return clock, rank, weight
        return None if best is None else (best[0], rank, best[2])

    def _choices(self, rank: int) -> list[int]:
        """Return the F and I that a rank may run next, in the sequence of the given order."""
        own = self.ends[rank]
        memory = self.orders.memory[rank]
        # The room once all W that are due have freed memory, and the least room before each pass.
        room = self.room[rank]
        room -= sum(memory[k + 2] * (len(own[k]) - len(own[k + 2])) for k in (2, 3))
        least = room
        choices: list[int] = []
        seen: set[int] = set()
        for kind in self.left[rank]:
            if kind not in seen:
                seen.add(kind)
                if not choices or memory[kind] <= (least if self.eager else 0):
                    choices.append(kind)
            room -= memory[kind]
            least = min(least, room)
            if kind > 1:
                room -= memory[kind + 2]
            if len(seen) == 4:
                break
        return choices

    def _arrival(self, rank: int, kind: int) -> float | None:
        """Return the time at which the input of a kind's next pass arrives; None if unknown yet."""
        own = self.ends[rank]
        micro = len(own[kind])
        need = NEEDS[kind]
        if need is not None and len(own[need]) <= micro:
            return None
        source = rank + 1 if kind % 2 else rank - 1
        if not 0 <= source < self.orders.n_ranks:
            return 0
        ends = self.ends[source][kind]
        return ends[micro] + self.orders.hop if micro < len(ends) else None
