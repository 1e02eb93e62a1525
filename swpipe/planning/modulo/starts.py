"""Schedules that the search starts from: stages of equal length, the order by list scheduling.

1. *Stages*: an iteration is cut into parts that take about as long as each other, as many as there
   may be iterations in flight. So a period has several parts to work on that do not wait for each
   other. A task that could be in several parts is in the first of them, or in the last.
2. *Order and threads*: of the tasks that no longer wait for another in the period, and can start
   soonest, the one with the longest path behind it comes next, on the first free thread.

Source: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swpipe.core.dependence import CycleError
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph

_MIXED = 0.5
"""By up to this fraction tasks count as shorter than they are, so that their order changes."""


def starts(graph: ScheduleGraph, threads: int, depth: int) -> list[ModuloSchedule]:
    """Schedules to start from; none where so few iterations in flight admit none."""
    found: list[ModuloSchedule] = []
    for late in (False, True):
        for parts in range(depth, 0, -1):
            stages = _stages(graph, depth, parts, late=late)
            schedule = _list_schedule(graph, stages, threads) if stages else None
            if schedule is not None:
                if schedule not in found:
                    found.append(schedule)
                break
    return found


def _stages(graph: ScheduleGraph, depth: int, parts: int, *, late: bool) -> list[int] | None:
    """Task to its stage, the last being depth - 1; None where dependences do not allow it."""
    time = _times(graph)
    path = _longest_paths(graph, time, late=late)
    longest = max(map(sum, zip(path, time, strict=True))) or 1.0
    middle = [(p + t / 2) / longest for p, t in zip(path, time, strict=True)]
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


def _times(graph: ScheduleGraph) -> list[float]:
    return [max(times) for times in zip(graph.host_us, graph.device_us, strict=True)]


def _longest_paths(graph: ScheduleGraph, time: Sequence[float], *, late: bool) -> list[float]:
    """Task to the longest path from the start of the iteration to it, or from it to the end."""
    path = [0.0] * graph.size
    arcs = graph.consumers if late else graph.producers
    for v in reversed(graph.serial) if late else graph.serial:
        path[v] = max((path[u] + time[u] for u, distance in arcs[v] if not distance), default=0.0)
    return path


def _list_schedule(
    graph: ScheduleGraph, stages: Sequence[int], threads: int
) -> ModuloSchedule | None:
    """List scheduling of one period; None where dependences within it form a cycle."""
    n = graph.size
    consumers: list[list[int]] = [[] for _ in range(n)]
    waits = [0] * n
    for c, p, distance in graph.deps:
        if stages[c] - stages[p] + distance == 0:
            consumers[p].append(c)
            waits[c] += 1
    try:
        order = period_order_of(graph, stages, {v: (v,) for v in range(n)})
    except CycleError:
        return None
    behind = _times(graph)  # task to the longest path from its start to the end of the period
    for v in reversed(order):
        behind[v] += max((behind[c] for c in consumers[v]), default=0.0)
    period = _Period(graph, threads)
    ready, placed, thread = [v for v in range(n) if not waits[v]], [], [0] * n
    while ready:
        start = {v: period.start(v) for v in ready}
        soonest = min(start.values())
        task = min(ready, key=lambda v: (start[v] > soonest, -behind[v], v))
        ready.remove(task)
        placed.append(task)
        thread[task] = period.add(task, consumers[task])
        for c in consumers[task]:
            waits[c] -= 1
            if not waits[c]:
                ready.append(c)
    return ModuloSchedule(tuple(thread), tuple(stages), tuple(placed))


class _Period:
    """A period that is filled: when threads and resources are free, and operations ready."""

    def __init__(self, graph: ScheduleGraph, threads: int) -> None:
        self._graph = graph
        self._thread = [0.0] * threads
        self._resource = [0.0] * len(graph.resources)
        self._ready = [0.0] * (2 * graph.size)

    def start(self, task: int) -> float:
        """When a task can start, so that its device work need not wait for its turn."""
        host = self._host(task)
        if not self._graph.streams:
            return host
        host_us = self._graph.host_us[task]
        return self._begin(self._graph.size + task, host + host_us) - host_us

    def add(self, task: int, consumers: Sequence[int]) -> int:
        """Start a task; the thread it starts on: of those that are free, the last to be busy."""
        graph, n, host = self._graph, self._graph.size, self._host(task)
        free = [k for k in self._threads(task) if self._thread[k] <= host]
        thread = max(free, key=lambda k: (self._thread[k], -k))
        submitted = self._thread[thread] = host + graph.host_us[task]
        device = self._begin(n + task, submitted)
        for start, operation in ((host, task), (device, n + task)):
            for resource, time_us in graph.reservations[operation]:
                self._resource[resource] = start + time_us
        for c in consumers:
            self._ready[c] = max(self._ready[c], submitted)
            self._ready[n + c] = max(self._ready[n + c], device + graph.device_us[task])
        return thread

    def _threads(self, task: int) -> range:
        return range(1 if task in self._graph.frozen else len(self._thread))

    def _host(self, task: int) -> float:
        return self._begin(task, min(self._thread[k] for k in self._threads(task)))

    def _begin(self, operation: int, us: float) -> float:
        reserved = self._graph.reservations[operation]
        return max(
            [us, self._ready[operation], *(self._resource[each.resource] for each in reserved)]
        )


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
