"""The order of a V as a list of kinds per rank: how long it takes, and a bound whatever the order.

    kind      0 F0   1 F1   2 I0   3 I1   4 W0   5 W1      raw chunks: in the order of the work
    way       down   up     down   up
    stage     r      2n-1-r        r      2n-1-r r

The k-th entry of a kind is microbatch k. Nothing is lost by that: where each stage takes its
microbatches in another order, numbering them as each stage takes them keeps every dependence and
every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from swpipe.plans.pipeline_parallel.action import Action, Op, Pair
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule

Objective: TypeAlias = Literal["makespan", "period", "bubble"]
Order: TypeAlias = list[list[int]]

NEEDS = (None, 0, 1, 2, 2, 3)
"""Kind to the kind of the same microbatch that comes before it on the same rank."""

_OPS: tuple[tuple[Op, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 1), ("W", 0))
"""Kind to op and physical chunk."""


class OrderTimes(NamedTuple):
    """When each rank starts and ends, and how long it idles in between.

    Attributes:
        ends: Per rank.
        spans: Per rank, from its first start to its end.
        bubbles: Per rank.
    """

    ends: list[float]
    spans: list[float]
    bubbles: list[float]

    def values(self, objective: Objective) -> list[float]:
        """Per rank, what the objective is the maximum of."""
        return {"makespan": self.ends, "period": self.spans, "bubble": self.bubbles}[objective]

    def value(self, objective: Objective) -> float:
        """The makespan, the period, or the largest bubble."""
        return max(self.values(objective))


class VOrders:
    """Times and memory of orders for one job."""

    def __init__(self, n_ranks: int, n_micro: int, costs: PipelineCosts) -> None:
        self.n_ranks, self.n_micro, self.costs, self.hop = n_ranks, n_micro, costs, costs.hop
        placement = [min(s, 2 * n_ranks - 1 - s) for s in range(2 * n_ranks)]
        actions = [
            [Action(self.stage(kind, rank), _OPS[kind][0], 0) for kind in range(6)]
            for rank in range(n_ranks)
        ]
        self.cost, self.memory, self.need = (
            [[of(action, placement) for action in row] for row in actions]
            for of in (costs.time, costs.memory, costs.need)
        )
        self.work = [sum(cost) * n_micro for cost in self.cost]
        self.saved = [2 * n_micro * self._saved(rank, placement) for rank in range(n_ranks)]
        self.max_mem = costs.widened_limit(2 * n_ranks)
        # What W needs is there at any time, so that it can free memory.
        self.room = [self.max_mem - max(need[4:]) for need in self.need]

    def _saved(self, rank: int, placement: Sequence[int]) -> float:
        """The most that a pair takes less than its parts."""
        stages = {self.stage(kind, rank) for kind in (0, 1)}
        pairs = [Pair(Action(f, "F", 0), Action(b, "B", 1)) for f in stages for b in stages]
        time = self.costs.time
        return max(0, *(sum(time(a, placement) for a in p) - time(p, placement) for p in pairs))

    def stage(self, kind: int, rank: int) -> int:
        """The stage of a kind on a rank."""
        return 2 * self.n_ranks - 1 - rank if _OPS[kind][1] else rank

    def times(self, order: Order) -> OrderTimes | None:
        """As soon as order and inputs allow; None where the order deadlocks."""
        n, hop = self.n_ranks, self.hop
        done: list[list[list[float]]] = [[[], [], [], []] for _ in range(n)]
        position = [0] * n
        clock: list[float] = [0] * n
        waiting: list[tuple[list[float], int] | None] = [None] * n
        ready = list(range(n - 1, -1, -1))
        while ready:
            rank = ready.pop()
            row, own, cost = order[rank], done[rank], self.cost[rank]
            before = done[rank - 1] if rank else None
            after = done[rank + 1] if rank < n - 1 else None
            time = clock[rank]
            for at in range(position[rank], len(row)):
                kind = row[at]
                if kind < 4:
                    ended, source = own[kind], after if kind % 2 else before
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

    def is_valid(self, row: Sequence[int], rank: int) -> bool:
        """Whether a rank's row keeps the order of each microbatch, and the memory."""
        counts, memory, needs = [0] * 6, self.memory[rank], self.need[rank]
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
        """Whether all rows are valid."""
        return all(self.is_valid(row, rank) for rank, row in enumerate(order))

    def order_of(self, schedule: PipelineSchedule) -> Order:
        """The order of a schedule on a V; a B becomes I and W, a pair F, I and W."""
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
        """The schedule of an order."""
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
    """No order of the job, with pairs or not, has a smaller makespan, period, or largest bubble.

    Rank r starts when the first microbatch has come down to it. Until that microbatch comes up
    again it can only run F0, as many as there are microbatches and memory; until its gradient
    comes, only F0 and F1. What is left of these waits is idle time::

        rank r   | head |F0 F0 F0 ..idle..|F1 ...                     until F1 arrives
                 | head |F0 F1 F0 F1 ..idle..       |I0 ...           until I0 arrives
    """
    starts, n = first_starts(orders), orders.n_ranks
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
    least = [b + w - s for b, w, s in zip(bubbles, orders.work, orders.saved, strict=True)]
    if objective == "period":
        return max(least)
    ends = [starts[0][rank] + least[rank] for rank in range(n)]
    chain = starts[3][0] + orders.cost[0][3] + orders.cost[0][5]
    return max(chain, *ends)


def first_starts(orders: VOrders) -> list[list[float]]:
    """When F0, F1, I0 and I1 of the first microbatch can start, by kind and rank."""
    n = orders.n_ranks
    time: float = 0
    starts = [[time] * n for _ in range(4)]
    for kind, start in enumerate(starts):
        ranks = range(n - 1, -1, -1) if kind % 2 else range(n)
        for rank in ranks:
            start[rank] = time
            time += orders.cost[rank][kind] + (orders.hop if rank != ranks[-1] else 0)
    return starts


def _most_forward(orders: VOrders, rank: int, turned: bool) -> float:
    """The most time that F0, and F1 if ``turned``, can fill before any memory is freed."""
    f0, f1 = orders.cost[rank][:2]
    down, up = orders.memory[rank][:2]
    m = orders.n_micro
    if not turned:  # F1 needs room as well
        return f0 * int(min(m, (orders.max_mem - up) / down))
    return max(
        f1 * count + f0 * most
        for count in range(m + 1)
        if (most := int(min(m, (orders.max_mem - up * count) / down))) >= count
    )
