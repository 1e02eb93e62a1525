"""Schedules that the search starts from: stages of equal length, all on the caller's thread.

An iteration is cut into parts that take about as long as each other, as many as there may be
iterations in flight. So a period has several parts to work on that do not wait for each other. A
task that could be in several parts is in the first of them, or in the last. Of the tasks that no
longer wait for another in the period, the one with the longest path behind it comes next.

Source: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994).
"""

from __future__ import annotations

from collections.abc import Callable

from swpipe.core.dependence import CycleError
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph

_MIXED = 0.5
"""By up to this fraction tasks count as shorter than they are, so that their order changes."""


def starts(graph: ScheduleGraph, depth: int) -> list[ModuloSchedule]:
    """Schedules to start from; none where so few iterations in flight admit none."""
    behind = _longest_paths(graph, late=True)
    longest_first = sorted(range(graph.size), key=lambda v: -behind[v])
    rank = {v: (place,) for place, v in enumerate(longest_first)}
    found: list[ModuloSchedule] = []
    for late in (False, True):
        for parts in range(depth, 0, -1):
            stages = _stages(graph, depth, parts, late=late)
            if stages is None:
                continue
            try:
                order = period_order_of(graph, stages, rank)
            except CycleError:
                continue
            schedule = ModuloSchedule((0,) * graph.size, tuple(stages), order)
            if schedule not in found:
                found.append(schedule)
            break
    return found


def _stages(graph: ScheduleGraph, depth: int, parts: int, *, late: bool) -> list[int] | None:
    """Task to its stage, the last being depth - 1; None where dependences do not allow it."""
    path = _longest_paths(graph, late=late)
    longest = max(path) or 1.0
    times = zip(path, graph.host_us, graph.device_us, strict=True)
    middle = [(us - max(host_us, device_us) / 2) / longest for us, host_us, device_us in times]
    stages = [min(parts - 1, int((1 - m if late else m) * parts)) for m in middle]
    for _ in range(2 * graph.size + 4):
        before = list(stages)
        for consumer, producer, distance in graph.deps:
            stages[consumer] = max(stages[consumer], stages[producer] - distance)
        for v in graph.last:
            stages[v] = max(stages)
        if stages == before:
            shift = depth - 1 - max(stages)
            return [stage + shift for stage in stages] if min(stages) + shift >= 0 else None
    return None


def _longest_paths(graph: ScheduleGraph, *, late: bool) -> list[float]:
    """Task to the longest path to its end from the start of the iteration, or on to the end of it.

    Its own time counts.
    """
    path = [max(times) for times in zip(graph.host_us, graph.device_us, strict=True)]
    arcs = graph.consumers if late else graph.producers
    for v in reversed(graph.serial) if late else graph.serial:
        path[v] += max((path[u] for u, distance in arcs[v] if not distance), default=0.0)
    return path


def distributed(
    graph: ScheduleGraph, threads: int, most_us: float, random: Callable[[], float]
) -> tuple[int, ...] | None:
    """Tasks distributed to threads at random, roughly the longest first.

    None where a task fits on no thread: each may have ``most_us`` of host work.
    """
    load, thread = [0.0] * threads, [0] * graph.size
    load[0] = sum(graph.host_us[v] for v in graph.frozen)
    key = [us * (1 - _MIXED * random()) for us in graph.host_us]
    for v in sorted(range(graph.size), key=key.__getitem__, reverse=True):
        if v not in graph.frozen:
            host_us = graph.host_us[v]
            fitting = [k for k, us in enumerate(load) if us + host_us <= most_us]
            if not fitting:
                return None
            thread[v] = fitting[int(random() * len(fitting))]
            load[thread[v]] += host_us
    return tuple(thread)
