r"""An estimate of the interval, from one period whose tasks are placed in order.

Tasks start one after the other in the order of the period, each as soon as it may::

    caller's thread  <admit> [f][b]......[step] <retire>       threads and resources are *rows*:
    a worker         [read .......][copy]                      one operation at a time
    stream "copies"                    [copy ....]

A dependence of lag 0 delays a task in this period; one of lag 1 or more binds a later period. So
the interval is, roughly, the greatest of

- the time of each row from its first start to its last end,
- for a dependence of lag k, the time between its two ends divided by k; every task depends on
  ``<admit>``, and ``<retire>`` on every task; both are on the caller's thread.

The estimate is not a proof: rows may shift against each other and do better, and a resource that
several threads request is granted in the order of the requests, not of the plan. The simulator
decides; but the estimate takes only about a microsecond per task.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.schedule_graph import CALLERS_STREAM, ScheduleGraph

_IDLE_WEIGHT = 0.1
"""The weight of idle time in the cost.

Of two schedules with equal intervals, the one with shorter rows is nearer to a better schedule.
"""


# A plain tuple, because the inner loop unpacks it: Python unpacks a named tuple more slowly.
_Into: TypeAlias = tuple[int, int, tuple[float, float], int]
"""An edge into an operation: tail, its task, times on one thread and across two, and distance."""


class Estimator:
    """A fast estimator of the interval of modulo schedules of one loop.

    Args:
        graph: The schedule graph of the loop.
        threads: The largest number of threads.
        depth: The number of iterations in flight.

    Attributes:
        ii_us: The interval of the last estimate, in microseconds.
    """

    def __init__(self, graph: ScheduleGraph, threads: int, depth: int) -> None:
        self.graph = graph
        self.threads = threads
        self.depth = depth
        self.ii_us = math.inf
        # All that does not depend on the schedule is computed once, because ``cost`` runs for each
        # move.
        count = len(graph.names)
        into: list[list[_Into]] = [[] for _ in range(2 * count)]
        for tail, head, time_us, distance in (*graph.edges, *graph.frame_edges(depth)):
            if tail % count != head % count or head >= count:
                over = graph.handover_us if head < count else 0.0
                into[head].append((tail, tail % count, (time_us, time_us + over), distance))
        # Row -1 stands for the thread of the task, which the schedule chooses. <admit> and <retire>
        # take no time on it.
        held = [[(-1, us)] for us in (*graph.launch_us, 0.0, 0.0)]
        held += [[(-1, us)] if v in graph.blocks else [] for v, us in enumerate(graph.device_us)]
        held += [[], []]
        for row, (name, uses) in enumerate(graph.uses.items(), threads):
            for operation, us in uses.items():
                held[operation].append((row, us))
            if name == CALLERS_STREAM:
                # <retire> is the last operation in the caller's stream.
                held[graph.device(graph.retire)].append((row, 0.0))
        self._work_us = [0.0] * threads + [sum(uses.values()) for uses in graph.uses.values()]
        operations = 2 * count if graph.streams else count
        self._operations = [
            [(v, into[v], held[v]) for v in range(task, operations, count)] for task in range(count)
        ]
        self._at = [0.0] * (2 * count)
        self._cause = [-1] * (2 * count)
        self._limiting = -1

    def cost(self, schedule: ModuloSchedule, limit_us: float = math.inf) -> float:
        """Return the interval of a schedule in microseconds, plus a small weight of idle time.

        The estimate of a schedule that costs more than ``limit_us`` may stop and return infinity.
        """
        at = self._at
        cause = self._cause
        order, thread, stage = self._framed(schedule)
        # The time of each row: its work, to which its idle time is added.
        row_us = self._work_us.copy()
        for v, host_us in enumerate(self.graph.host_us):
            row_us[thread[v]] += host_us
        free = [0.0] * len(row_us)
        last = [-1] * len(row_us)
        # The caller's thread begins with ``<retire>`` of the period before.
        last[0] = self.graph.retire
        later: list[tuple[int, int, float, int]] = []
        for task in order:
            mine = thread[task]
            s = stage[task]
            start = 0.0
            for operation, into, held in self._operations[task]:
                because = -1
                for tail, producer, times_us, distance in into:
                    wait_us = times_us[thread[producer] != mine]
                    # Edges of a greater lag bind a later period: they are checked when all starts
                    # are known.
                    if lag := s - stage[producer] + distance:
                        later.append((tail, operation, wait_us, lag))
                    elif at[tail] + wait_us > start:
                        start = at[tail] + wait_us
                        because = tail
                for row, _ in held:
                    k = mine if row < 0 else row
                    if free[k] > start:
                        start = free[k]
                        because = last[k]
                # ``cause`` is the operation that this one waited for: ``critical`` follows these
                # links back.
                at[operation], cause[operation] = start, because
                for row, time_us in held:
                    k = mine if row < 0 else row
                    if last[k] >= 0:
                        row_us[k] += start - free[k]
                    if row_us[k] > limit_us:
                        return math.inf
                    free[k], last[k] = start + time_us, operation
        times = [*zip(row_us, last, strict=True)]
        times += [((at[tail] + us - at[head]) / lag, tail) for tail, head, us, lag in later]
        self.ii_us, self._limiting = max(times)
        return self.ii_us + _IDLE_WEIGHT * sum(row_us[: self.threads]) / self.threads

    def _framed(self, schedule: ModuloSchedule) -> tuple[list[int], list[int], list[int]]:
        """Return the order, threads and stages with those of ``<admit>`` and ``<retire>``."""
        order = schedule.order
        stage = schedule.stage
        oldest = max(stage)
        newest = oldest - self.depth + 1
        place = 0
        if self.graph.streams:
            # The new iteration is admitted right before its first task, so that the device has work
            # while the host waits.
            of_newest = (k for k, v in enumerate(order) if stage[v] == newest)
            place = next(of_newest, len(order))
        admit = self.graph.admit
        framed = [*order[:place], admit, *order[place:], self.graph.retire]
        return framed, [*schedule.thread, 0, 0], [*stage, newest, oldest]

    def critical(self) -> list[int]:
        """Return the tasks that set the last estimate's interval, each waiting for the next."""
        operation = self._limiting
        tasks = []
        while operation >= 0:
            tasks.append(operation % len(self.graph.names))
            operation = self._cause[operation]
        size = self.graph.size
        return [v for v in tasks if v < size] or list(range(size))
