"""The host work of the busiest thread at best: a lower bound on the interval.

All distributions of the tasks to threads that might still be better than the best so far are tried
("branch and bound"), the longest tasks first, each on the thread with the least work first.
"""

from __future__ import annotations

from swpipe.planning.modulo.schedule_graph import ScheduleGraph

_EPS_US = 1e-6

_MOST_NODES = 10_000
"""Tasks placed before the search is given up."""

_MOST_TASKS = 24
"""In loops of more tasks than this, threads are taken to share the work evenly."""


def least_load(graph: ScheduleGraph, threads: int) -> float:
    """The host work of the busiest thread where it is shared best, or a lower bound of it."""
    free = [v for v in range(graph.size) if v not in graph.frozen]
    work = sorted((graph.host_us[v] for v in free), reverse=True)
    load = [0.0] * threads
    load[0] = sum(graph.host_us[v] for v in graph.frozen)
    even = max(sum(graph.host_us) / threads, load[0], *graph.host_us)
    if graph.size > _MOST_TASKS:
        return even
    least, nodes = sum(graph.host_us) + 1.0, 0

    def place(k: int) -> None:
        nonlocal least, nodes
        if k == len(work):
            least = max(load)
            return
        if sum(max(0.0, least - us) for us in load) < sum(work[k:]):
            return
        for before, thread in sorted({us: thread for thread, us in enumerate(load)}.items()):
            after = before + work[k]
            if nodes > _MOST_NODES or least <= even + _EPS_US or after >= least - _EPS_US:
                return
            nodes += 1
            load[thread] = after
            place(k + 1)
            load[thread] = before

    place(0)
    return even if nodes > _MOST_NODES else least
