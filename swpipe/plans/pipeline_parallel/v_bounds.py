"""A lower bound of what a V can reach, whatever its order.

Rank r starts when the first microbatch has come down to it. Until that microbatch comes up again it
can only run F0, as many as there are microbatches and memory; until its gradient comes, only F0 and
F1. What is left of these waits is idle time::

    rank r   | head |F0 F0 F0 ..idle..|F1 ...                     until F1 arrives
             | head |F0 F1 F0 F1 ..idle..       |I0 ...           until I0 arrives
"""

from __future__ import annotations

from swpipe.plans.pipeline_parallel.v_order import Objective, VOrders


def lower_bound(orders: VOrders, objective: Objective) -> float:
    """No order of the job has a smaller makespan, or largest bubble."""
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
    ends = [starts[0][rank] + bubbles[rank] + orders.work[rank] for rank in range(n)]
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
    m = orders.n_micro
    passes = int(min(orders.max_mem // orders.memory[0], 2 * m + 1))
    if not turned:  # F1 needs room as well
        return f0 * min(m, passes - 1)
    least, most = max(0, passes - m), min(m, passes // 2)
    counts = {min(one, most) for one in (0, least, most)}
    return max(f1 * one + f0 * min(m, passes - one) for one in counts)
