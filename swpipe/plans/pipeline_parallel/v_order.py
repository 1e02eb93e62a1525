"""The order of a V as a list of kinds per rank, with its times, and a lower bound for all orders.

    kind         0 F0      1 F1      2 I0      3 I1      4 W0      5 W1
    direction    down      up        down      up
    stage        r         2n-1-r    2n-1-r    r         2n-1-r    r

The numbers of the chunks (*raw* chunks) follow the order in which a microbatch reaches them. The
k-th entry of a kind on a rank is microbatch k. This is no restriction: if a stage takes the
microbatches in another order, renumbering them keeps every dependence and every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from swpipe.plans.pipeline_parallel.action import Action, Op, Pair
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule

Objective: TypeAlias = Literal["makespan", "period", "bubble"]
Order: TypeAlias = list[list[int]]

NEEDS = (None, 0, 1, 2, 2, 3)
"""For each kind, the kind that must come before it for the same microbatch on the same rank."""

_OPS: tuple[tuple[Op, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 1), ("W", 0))
"""The op and the physical chunk of each kind."""


class OrderTimes(NamedTuple):
    """The times of an order, in the unit of the costs.

    Attributes:
        ends: The end of each rank's last pass.
        spans: The time of each rank from its first start to its end.
        bubbles: The idle time of each rank between its first start and its end.
    """

    ends: list[float]
    spans: list[float]
    bubbles: list[float]

    def values(self, objective: Objective) -> list[float]:
        """Return the value of each rank, of which the objective is the maximum."""
        return {"makespan": self.ends, "period": self.spans, "bubble": self.bubbles}[objective]


class VOrders:
    """The costs of one job by rank and kind, and the times and memory of its orders.

    Args:
        n_ranks: The number of ranks.
        n_micro: The number of microbatches.
        costs: The costs of the passes.
    """

    def __init__(self, n_ranks: int, n_micro: int, costs: PipelineCosts) -> None:
        self.n_ranks = n_ranks
        self.n_micro = n_micro
        self.costs = costs
        self.hop = costs.hop
        actions = [
            [Action(self.stage(kind, rank), _OPS[kind][0], 0) for kind in range(6)]
            for rank in range(n_ranks)
        ]
        # Indexed by rank and kind, since the search looks them up for every pass of every order.
        self.cost, self.memory, self.need = (
            [[of(action) for action in row] for row in actions]
            for of in (costs.time, costs.memory, costs.need)
        )
        self.work = [sum(cost) * n_micro for cost in self.cost]
        self.saved = [2 * n_micro * self._saved(rank) for rank in range(n_ranks)]
        self.max_mem = costs.widened_limit(2 * n_ranks)
        # The memory that F and I may use: the working memory of W stays free, so that a W can run
        # at any time to free memory.
        self.room = [self.max_mem - max(need[4:]) for need in self.need]

    def _saved(self, rank: int) -> float:
        """Return the largest time that a pair of the rank's stages saves over its two passes."""
        stages = {self.stage(kind, rank) for kind in (0, 1)}
        pairs = [Pair(Action(f, "F", 0), Action(b, "B", 1)) for f in stages for b in stages]
        time = self.costs.time
        return max(0, *(sum(map(time, pair)) - time(pair) for pair in pairs))

    def stage(self, kind: int, rank: int) -> int:
        """Return the stage of a kind on a rank."""
        return 2 * self.n_ranks - 1 - rank if _OPS[kind][1] else rank

    def times(self, order: Order) -> OrderTimes | None:
        """Return the earliest times of an order, or None if the order deadlocks."""
        # Each ready rank runs its row until an input is missing, and is ready again when the
        # neighbour has it. This is the innermost loop of the search: local names, and lists of ends
        # that grow by one per microbatch instead of dictionaries.
        n = self.n_ranks
        hop = self.hop
        done: list[list[list[float]]] = [[[], [], [], []] for _ in range(n)]
        position = [0] * n
        clock: list[float] = [0] * n
        waiting: list[tuple[list[float], int] | None] = [None] * n
        ready = list(range(n - 1, -1, -1))
        while ready:
            rank = ready.pop()
            row = order[rank]
            own = done[rank]
            cost = self.cost[rank]
            before = done[rank - 1] if rank else None
            after = done[rank + 1] if rank < n - 1 else None
            time = clock[rank]
            for at in range(position[rank], len(row)):
                kind = row[at]
                if kind < 4:  # W needs no other rank
                    ended = own[kind]
                    source = after if kind % 2 else before
                    if source is not None:
                        micro = len(ended)
                        if micro >= len(source[kind]):
                            waiting[rank] = (source[kind], micro)
                            position[rank] = at
                            break
                        arrival = source[kind][micro] + hop
                        if arrival > time:
                            time = arrival
                    ended.append(time + cost[kind])
                time += cost[kind]
            clock[rank] = time
            # Only neighbours can wait for results of this rank.
            for other in (rank - 1, rank + 1):
                if 0 <= other < n and (wait := waiting[other]) and len(wait[0]) > wait[1]:
                    waiting[other] = None
                    ready.append(other)
        if any(waiting):
            return None
        heads = [done[rank][0][0] - self.cost[rank][0] for rank in range(n)]
        spans = [end - head for end, head in zip(clock, heads, strict=True)]
        bubbles = [span - work for span, work in zip(spans, self.work, strict=True)]
        return OrderTimes(clock, spans, bubbles)

    def value(self, order: Order, objective: Objective) -> tuple[float, float]:
        """Return the value of the objective, and the sum over the ranks to compare equal values.

        Both are infinite if the order deadlocks.
        """
        times = self.times(order)
        values = [math.inf] if times is None else times.values(objective)
        return max(values), sum(values)

    def is_valid(self, row: Sequence[int], rank: int) -> bool:
        """Return whether a rank's row keeps the order of each microbatch, and the memory limit."""
        counts = [0] * 6
        memory = self.memory[rank]
        needs = self.need[rank]
        used: float = 0
        for kind in row:
            counts[kind] += 1
            need = NEEDS[kind]
            if need is not None and counts[kind] > counts[need]:
                return False
            if used + needs[kind] > self.max_mem:
                return False
            used += memory[kind]
        return True

    def fits(self, order: Order) -> bool:
        """Return whether all rows are valid."""
        return all(self.is_valid(row, rank) for rank, row in enumerate(order))

    def order_of(self, schedule: PipelineSchedule) -> Order:
        """Return the order of a schedule on a V, with each B replaced by I and W.

        A pair becomes F, I and W.
        """
        kinds = {(op, chunk): kind for kind, (op, chunk) in enumerate(_OPS)}
        rows = []
        for rank, actions in enumerate(schedule.actions):
            row = []
            for stage, op, _ in actions:
                chunk = int(stage != rank)
                row += [kinds["I", chunk], kinds["W", chunk]] if op == "B" else [kinds[op, chunk]]
            rows.append(row)
        return rows

    def schedule_of(self, order: Order) -> PipelineSchedule:
        """Return the schedule of an order."""
        rows = []
        for rank, row in enumerate(order):
            counts = [0] * 6
            actions = []
            for kind in row:
                actions.append(Action(self.stage(kind, rank), _OPS[kind][0], counts[kind]))
                counts[kind] += 1
            rows.append(tuple(actions))
        return PipelineSchedule(tuple(rows), self.n_micro)


def lower_bound(orders: VOrders, objective: Objective) -> float:
    """Return a lower bound of the objective for all orders of the job, with or without pairs.

    A rank starts when the first microbatch arrives on the way down. Until this microbatch arrives
    on the way up, the rank can only run F0, limited by the number of microbatches and the memory.
    Until its gradient arrives, the rank can only run F0 and F1. The rest of both waits is idle
    time::

        rank r   | head |F0 F0 F0 ..idle..|F1 ...                     until F1's input arrives
                 | head |F0 F1 F0 F1 ..idle..       |I0 ...           until I0's input arrives
    """
    starts = first_starts(orders)
    n = orders.n_ranks
    bubbles = [
        max(
            0,
            starts[1][rank] - starts[0][rank] - _most_forward(orders, rank, turned=False),
            starts[2][rank] - starts[0][rank] - _most_forward(orders, rank, turned=True),
        )
        for rank in range(n)
    ]
    if objective == "bubble":
        return max(bubbles)
    # Work that no order avoids, less what pairs can save at most.
    least = [b + w - s for b, w, s in zip(bubbles, orders.work, orders.saved, strict=True)]
    if objective == "period":
        return max(least)
    ends = [starts[0][rank] + least[rank] for rank in range(n)]
    # The first microbatch alone: down and up the V twice, and then W1 of rank 0.
    chain = starts[3][0] + orders.cost[0][3] + orders.cost[0][5]
    return max(chain, *ends)


def first_starts(orders: VOrders) -> list[list[float]]:
    """Return the earliest starts of F0, F1, I0 and I1 of the first microbatch, by kind and rank."""
    n = orders.n_ranks
    time: float = 0
    starts = [[time] * n for _ in range(4)]
    for kind, start in enumerate(starts):
        ranks = range(n - 1, -1, -1) if kind % 2 else range(n)
        for rank in ranks:
            # No hop at the turning points of the V, where the next kind is on the same rank.
            start[rank] = time
            time += orders.cost[rank][kind] + (orders.hop if rank != ranks[-1] else 0)
    return starts


def _most_forward(orders: VOrders, rank: int, turned: bool) -> float:
    """Return the largest time that F0, and F1 if ``turned``, can fill before memory is freed."""
    f0, f1 = orders.cost[rank][:2]
    down, up = orders.memory[rank][:2]
    m = orders.n_micro
    if not turned:
        # The first F1 needs room as well, or the microbatch could not go on.
        return f0 * int(min(m, (orders.max_mem - up) / down))
    # For each number of F1, as many F0 as the rest of the memory takes: at least one per F1.
    return max(
        f1 * count + f0 * most
        for count in range(m + 1)
        if (most := int(min(m, (orders.max_mem - up * count) / down))) >= count
    )
