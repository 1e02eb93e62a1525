"""The initial schedule of the search, with stages of equal length and threads of equal work.

1. *Stages*: an iteration is cut into parts of about equal time, as many as iterations may be in
   flight. So a period has several parts to work on that do not wait for each other. A task that
   could be in several parts is in the first of them.
2. *Order and threads*: tasks come in serial order, each on the thread with the least work so far.
   The search then removes waits between threads and for resources.

Source: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from swpipe.core.dependence import CycleError
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph, least_stages

_MIXED = 0.5
"""The fraction by which tasks may count as shorter than they are, to vary their order."""


def first_schedule(graph: ScheduleGraph, threads: int, depth: int) -> ModuloSchedule | None:
    """Return a schedule to start from; None if so few iterations in flight admit none."""
    thread = packed(graph, threads, 0.0)
    # Fewer parts than the depth if dependences forbid so many.
    for parts in range(depth, 0, -1):
        stages = _stages(graph, depth, parts)
        if stages is not None:
            # Dependences within the period may form a cycle.
            with suppress(CycleError):
                return ModuloSchedule(thread, tuple(stages), period_order_of(graph, stages))
    return None


def _stages(graph: ScheduleGraph, depth: int, parts: int) -> list[int] | None:
    """Return the stage of each task, the last being depth - 1; None if dependences forbid it."""
    time = [max(times) for times in zip(graph.host_us, graph.device_us, strict=True)]
    # The longest path from the iteration's start to each task.
    path = [0.0] * graph.size
    for v in graph.serial:
        before = [path[u] + time[u] for u, distance in graph.producers[v] if not distance]
        path[v] = max(before, default=0.0)
    longest = max(map(sum, zip(path, time, strict=True))) or 1.0
    # A task belongs to the part in which its middle lies on the longest path.
    middle = [(p + t / 2) / longest for p, t in zip(path, time, strict=True)]
    stages = [min(parts - 1, int(m * parts)) for m in middle]
    for _ in range(2 * graph.size + 4):
        given = stages
        stages = [*least_stages(graph.deps, dict(enumerate(given))).values()]
        # Repeat until nothing changes: dependences and frozen tasks move each other to later
        # stages.
        for v in graph.frozen:
            stages[v] = max(stages)
        if stages == given:
            shift = depth - 1 - max(stages)
            return [stage + shift for stage in stages] if min(stages) + shift >= 0 else None
    return None


def packed(graph: ScheduleGraph, threads: int, most_us: float) -> tuple[int, ...]:
    """Return a thread for each task: the first one that has ``most_us`` of work at most with it.

    A task that fits on no thread is on the one with the least work.
    """
    load = [0.0] * threads
    thread = [0] * graph.size
    load[0] = graph.frozen_us
    # From the last task on, which thereby shares the caller's thread with those right before it.
    for v in reversed(graph.serial):
        if v not in graph.frozen:
            fitting = [k for k, us in enumerate(load) if us + graph.host_us[v] <= most_us]
            thread[v] = fitting[0] if fitting else load.index(min(load))
            load[thread[v]] += graph.host_us[v]
    return tuple(thread)


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
