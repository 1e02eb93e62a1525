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

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from swpipe.core.dependence import CycleError
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph, least_stages


def first_schedule(graph: ScheduleGraph, threads: int, depth: int) -> ModuloSchedule | None:
    """Return a schedule to start from; None if so few iterations in flight admit none."""
    # From the last task on, so that it is on the caller's thread; each where the least work is.
    tasks = reversed(graph.serial)
    thread = packed(graph, tasks, threads, math.inf, lambda work: min(work, key=lambda k: work[k]))
    # Fewer parts than the depth if dependences forbid so many.
    for parts in range(depth, 0, -1):
        stages = _stages(graph, depth, parts)
        if thread is not None and stages is not None:
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


def packed(
    graph: ScheduleGraph,
    tasks: Iterable[int],
    threads: int,
    most_us: float,
    pick: Callable[[Mapping[int, float]], int],
) -> tuple[int, ...] | None:
    """Return a thread for each task, placing one task after the other; None if one fits nowhere.

    Args:
        graph: The schedule graph of the loop.
        tasks: The tasks, in the order in which they are placed.
        threads: The number of threads available.
        most_us: The host work that a thread may have.
        pick: Chooses one of the threads on which a task fits, given their work so far.
    """
    load = [0.0] * threads
    thread = [0] * graph.size
    load[0] = graph.frozen_us
    for v in tasks:
        if v not in graph.frozen:
            host_us = graph.host_us[v]
            fitting = {k: us for k, us in enumerate(load) if us + host_us <= most_us}
            if not fitting:
                return None
            thread[v] = pick(fitting)
            load[thread[v]] += host_us
    return tuple(thread)
