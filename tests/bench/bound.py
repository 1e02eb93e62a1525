"""The lower bounds on a plan's initiation interval (Rau, 1994), from the lengths of its tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from swpipe import PipelinePlan

Edge = tuple[str, str, int]
"""Producer, consumer, distance."""


def bound_ms(plan: PipelinePlan, ms: Mapping[str, float]) -> float:
    """max(ResMII, RecMII): the busiest thread group, or the heaviest cycle per distance, in ms."""
    busy: dict[str, float] = defaultdict(float)
    for name, entry in plan.schedule.items():
        busy[entry.thread_group] += ms[name]
    return max(*busy.values(), rec_mii_ms(plan, ms))


def rec_mii_ms(plan: PipelinePlan, ms: Mapping[str, float]) -> float:
    """The least interval at which every dependence can be kept, in ms, to a nanosecond."""
    edges = [(p, c, 0) for c, p in plan.deps] + [(p, c, d) for c, p, d in plan.cross_iter_deps]
    low, high = 0.0, sum(ms.values())
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _too_short(middle, edges, ms) else (low, middle)
    return high


def _too_short(interval: float, edges: list[Edge], ms: Mapping[str, float]) -> bool:
    """Whether no start times keep every edge at this interval (Bellman and Ford)."""
    start = dict.fromkeys(ms, 0.0)
    for _ in range(len(start) + 1):
        moved = False
        for producer, consumer, distance in edges:
            earliest = start[producer] + ms[producer] - interval * distance
            if earliest > start[consumer] + 1e-9:
                start[consumer] = earliest
                moved = True
        if not moved:
            return False
    return True
