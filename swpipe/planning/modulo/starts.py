"""Initial schedules of the search, with stages of equal length and threads of equal work.

1. *Stages*: an iteration is cut into parts of about equal time, as many as iterations may be in
   flight. So a period has several parts to work on that do not wait for each other. A task that
   could be in several parts is in the first of them or, in a second schedule, in the last.
2. *Order and threads*: the task with the longest path behind it comes first, on the thread with the
   least work so far. The search then removes waits between threads and for resources.

Source: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swpipe.core.dependence import CycleError
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph, least_stages

_MIXED = 0.5
"""The fraction by which tasks may count as shorter than they are, to vary their order."""


def starts(graph: ScheduleGraph, threads: int, depth: int) -> list[ModuloSchedule]:
    """Return schedules to start from; none if so few iterations in flight admit no schedule."""
    schedules: list[ModuloSchedule] = []
    for late in (False, True):
        # Fewer parts than the depth if dependences forbid so many.
        for parts in range(depth, 0, -1):
            stages = _stages(graph, depth, parts, late=late)
            schedule = _in_order(graph, stages, threads) if stages else None
            if schedule is not None:
                if schedule not in schedules:
                    schedules.append(schedule)
                break
    return schedules


def _stages(graph: ScheduleGraph, depth: int, parts: int, *, late: bool) -> list[int] | None:
    """Return the stage of each task, the last being depth - 1; None if dependences forbid it."""
    time = _times(graph)
    path = _longest_paths(graph, time, late=late)
    longest = max(map(sum, zip(path, time, strict=True))) or 1.0
    # A task belongs to the part in which its middle lies on the longest path.
    middle = [(p + t / 2) / longest for p, t in zip(path, time, strict=True)]
    stages = [min(parts - 1, int((1 - m if late else m) * parts)) for m in middle]
    for _ in range(2 * graph.size + 4):
        before = stages
        stages = [*least_stages(graph.deps, dict(enumerate(before))).values()]
        # Repeat until nothing changes: dependences and frozen tasks move each other to later
        # stages.
        for v in graph.frozen:
            stages[v] = max(stages)
        if stages == before:
            shift = depth - 1 - max(stages)
            return [stage + shift for stage in stages] if min(stages) + shift >= 0 else None
    return None


def _times(graph: ScheduleGraph) -> list[float]:
    return [max(times) for times in zip(graph.host_us, graph.device_us, strict=True)]


def _longest_paths(graph: ScheduleGraph, time: Sequence[float], *, late: bool) -> list[float]:
    """Return the longest path from the iteration's start to each task; if ``late``, to its end."""
    path = [0.0] * graph.size
    arcs = graph.consumers if late else graph.producers
    for v in reversed(graph.serial) if late else graph.serial:
        path[v] = max((path[u] + time[u] for u, distance in arcs[v] if not distance), default=0.0)
    return path


def _in_order(graph: ScheduleGraph, stages: Sequence[int], threads: int) -> ModuloSchedule | None:
    """Return the schedule of some stages; None if dependences within the period form a cycle."""
    time = _times(graph)
    # List scheduling: the most urgent task first, each on the least loaded thread.
    behind = _longest_paths(graph, time, late=True)
    first = sorted(graph.serial, key=lambda v: -behind[v] - time[v])
    try:
        order = period_order_of(graph, stages, {v: (place,) for place, v in enumerate(first)})
    except CycleError:
        return None
    load = [0.0] * threads
    thread = [0] * graph.size
    load[0] = graph.frozen_us
    for v in order:
        if v not in graph.frozen:
            thread[v] = load.index(min(load))
            load[thread[v]] += graph.host_us[v]
    return ModuloSchedule(tuple(thread), tuple(stages), order)


def distributed(
    graph: ScheduleGraph, threads: int, most_us: float, random: Callable[[], float]
) -> tuple[int, ...] | None:
    """Return a random distribution of tasks to threads, placing roughly the longest tasks first.

    Each thread may have ``most_us`` of host work. Returns None if a task fits on no thread.
    """
    load = [0.0] * threads
    thread = [0] * graph.size
    load[0] = graph.frozen_us
    # Placing the longest tasks first fills threads evenly; the random factor varies the result.
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
