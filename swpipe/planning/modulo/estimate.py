r"""An estimate of the interval, from one period whose tasks are placed in order.

Tasks start one after the other in the order of the period, each as soon as it may::

    caller's thread  <admit> [f][b]......[step] <retire>       threads and resources are *rows*:
    a worker         [read .......][copy]                      one operation at a time
    stream "copies"                    [copy ....]

A dependence of lag 0 delays a task in this period; one of lag 1 or more binds a later period. So
the interval is, roughly, the greatest of

- the time of each row from its first start to its last end,
- for a dependence of lag k, the time between its two ends divided by k,
- the time between ``<admit>`` and ``<retire>``, which are both on the caller's thread and ``depth``
  periods apart for an iteration. The device may finish the iteration ``run_ahead`` periods later.

The estimate is not a proof: rows may shift against each other and do better, and a resource that
several threads request is granted in the order of the requests, not of the plan. The simulator
decides; but the estimate takes only about a microsecond per task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from swpipe.planning.modulo.schedule_graph import CALLERS_STREAM, ScheduleGraph

_IDLE_WEIGHT = 0.1
"""The weight of idle time in the cost.

Of two schedules with equal intervals, the one with shorter rows is nearer to a better schedule.
"""


class _Into(NamedTuple):
    """An edge into an operation: tail, its task, time, extra time across threads, and distance."""

    tail: int
    producer: int
    time_us: float
    across_us: float
    distance: int


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
        n = graph.size
        self.graph = graph
        self.threads = threads
        self.depth = depth
        self.ii_us = math.inf
        self._rows = threads + len(graph.uses)
        self._callers_row = -1
        # All that does not depend on the schedule is computed once, because ``cost`` runs for each
        # move.
        into: list[list[_Into]] = [[] for _ in range(2 * n)]
        for tail, head, time_us, distance in graph.edges:
            if tail % n != head % n or head >= n:
                over = graph.handover_us if head < n else 0.0
                into[head].append(_Into(tail, tail % n, time_us, over, distance))
        # Row -1 stands for the thread of the task, which the schedule chooses.
        held = [[(-1, us)] for us in graph.launch_us]
        held += [[(-1, us)] if v in graph.blocks else [] for v, us in enumerate(graph.device_us)]
        for row, (name, uses) in enumerate(graph.uses.items(), threads):
            if name == CALLERS_STREAM:
                self._callers_row = row
            for operation, us in uses.items():
                held[operation].append((row, us))
        # A task's host work (number v) comes before its device work (number n + v).
        operations = 2 * n if graph.streams else n
        self._operations = [
            [(v, into[v], held[v]) for v in range(task, operations, n)] for task in range(n)
        ]
        self._at = [0.0] * (2 * n)
        self._cause = [-1] * (2 * n)
        self._limiting = -1

    def cost(  # noqa: C901 - the inner loop of the search: calls would double its time
        self,
        order: Sequence[int],
        thread: Sequence[int],
        stage: Sequence[int],
        limit_us: float = math.inf,
    ) -> float:
        """Return the interval of a schedule in microseconds, plus a small weight of idle time.

        The estimate of a schedule that costs more than ``limit_us`` may stop and return infinity.
        """
        at = self._at
        cause = self._cause
        handover_us = self.graph.handover_us
        free = [0.0] * self._rows
        first = [-1.0] * self._rows
        last = [-1] * self._rows
        # The caller's thread begins with ``<retire>`` of the period before.
        first[0] = 0.0
        admit = -1.0 if self.graph.streams else 0.0
        newest = max(stage) - self.depth + 1
        later: list[tuple[int, int, _Into]] = []
        for task in order:
            mine = thread[task]
            s = stage[task]
            start = 0.0
            # The newest stage is admitted in this period, so its tasks start after ``<admit>``.
            if s == newest:
                if admit < 0:
                    admit = free[0]
                start = admit + handover_us if mine else admit
            for operation, into, held in self._operations[task]:
                because = -1
                for edge in into:
                    tail, producer, time_us, across_us, distance = edge
                    # Edges of a greater lag bind a later period: they are checked when all starts
                    # are known.
                    if lag := s - stage[producer] + distance:
                        later.append((operation, lag, edge))
                    else:
                        ready = at[tail] + time_us
                        if across_us and thread[producer] != mine:
                            ready += across_us
                        if ready > start:
                            start = ready
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
                    free[k], last[k] = start + time_us, operation
                    if first[k] < 0:
                        first[k] = start
                    elif start + time_us - first[k] > limit_us:
                        return math.inf
        us = self._later_time(self._row_time(free, first, last), later, thread)
        if us > limit_us:
            return us
        admit = admit if admit >= 0 else free[0]
        self.ii_us = self._frame_time(us, thread, stage, admit, free[0], first)
        idle = sum(free[k] - first[k] for k in range(self.threads) if first[k] >= 0)
        return self.ii_us + _IDLE_WEIGHT * idle / self.threads

    def critical(self) -> list[int]:
        """Return the tasks that set the last estimate's interval, each waiting for the next."""
        operation = self._limiting
        tasks = []
        while operation >= 0:
            tasks.append(operation % self.graph.size)
            operation = self._cause[operation]
        return tasks or list(range(self.graph.size))

    def _row_time(
        self, free: Sequence[float], first: Sequence[float], last: Sequence[int]
    ) -> float:
        longest = 0.0
        self._limiting = last[0]
        for row in range(self._rows):
            if first[row] >= 0 and free[row] - first[row] > longest:
                longest = free[row] - first[row]
                self._limiting = last[row]
        return longest

    def _later_time(
        self, us: float, later: Sequence[tuple[int, int, _Into]], thread: Sequence[int]
    ) -> float:
        n = self.graph.size
        at = self._at
        for head, lag, (tail, producer, time_us, across_us, _) in later:
            after = at[tail] + time_us - at[head]
            if thread[producer] != thread[head % n]:
                after += across_us
            if after > us * lag:
                us = after / lag
                self._limiting = tail
        return us

    def _frame_time(
        self,
        us: float,
        thread: Sequence[int],
        stage: Sequence[int],
        admit: float,
        retire: float,
        first: Sequence[float],
    ) -> float:
        """Return the interval, raised to what ``<admit>`` and ``<retire>`` require."""
        graph = self.graph
        at = self._at
        n = self.graph.size
        over = self.graph.handover_us
        oldest = max(stage)
        newest = oldest - self.depth + 1
        ends = [at[v] + host + (over if thread[v] else 0.0) for v, host in enumerate(graph.host_us)]
        for v in graph.blocks:
            ends[v] = at[n + v] + graph.device_us[v] + (over if thread[v] else 0.0)
        # ``<retire>`` waits for all tasks of the oldest stage. Tasks of earlier stages have more
        # periods.
        closed = max([retire, *(ends[v] for v in range(n) if stage[v] == oldest)])
        late = [end - closed for end in ends]
        us = max(us, closed)
        if graph.streams:
            ends = [at[n + v] + device for v, device in enumerate(graph.device_us)]
            callers = graph.on_callers_stream
            of_oldest = (ends[v] for v in range(n) if stage[v] == oldest or v in callers)
            done = max([closed, *of_oldest])
            late = [max(host, end - done) for host, end in zip(late, ends, strict=True)]
            if graph.run_ahead is not None:
                us = max(us, (done + over - admit) / (1 + graph.run_ahead))
            # ``<retire>`` is the last operation in the caller's stream, whose first one waits for
            # it.
            if self._callers_row >= 0:
                us = max(us, done - first[self._callers_row])
        for v in range(n):
            if stage[v] > newest and (admit + over - at[v]) > us * (stage[v] - newest):
                us = (admit + over - at[v]) / (stage[v] - newest)
            if stage[v] < oldest and late[v] > us * (oldest - stage[v]):
                us = late[v] / (oldest - stage[v])
        return us
