r"""One period of a loop, played in the order of a plan: how soon can the next one follow?

Tasks start one after the other in the order of the period, each as soon as it may::

    caller's thread  <admit> [f][b]......[step] <retire>       threads, streams and resources are
    a worker         [read .......][copy]                      *rows*: one operation at a time
    stream "copies"                    [copy ....]

A dependence of lag 0 holds a task back; one of lag 1 or more binds a later period. So the interval
is, at least roughly, the greatest of

- every row's time from its first start to its last end,
- what a dependence of lag k leaves between its two ends, over k,
- <admit> and <retire>: both are the caller's, and an iteration is ``depth`` periods between them.

It is a promise, and not proof: rows may shift against each other and do better, and what several
threads ask for at once is had by who comes first, whatever the order of the plan. The simulator has
the last word; but this costs a few microseconds for each task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from swpipe.plans.modulo.loop_graph import CALLERS_STREAM, LoopGraph

_SPREAD = 0.1
"""Of two plans with one interval that with the shorter rows is nearer to a better one."""


class _Into(NamedTuple):
    """An edge that leads to an operation."""

    tail: int
    task: int
    """The tail's."""

    time_us: float
    distance: int
    handover_us: float
    """On top where the two are on different threads."""


class _Work(NamedTuple):
    """What a task does on its thread, or on its stream.

    Attributes:
        operation: Its number.
        into: Edges that lead to it.
        holds: Thread to the rows that it takes there, and for how long; all alike for device work.
    """

    operation: int
    into: tuple[_Into, ...]
    holds: tuple[tuple[tuple[int, float], ...], ...]


_Later: TypeAlias = tuple[int, int, float, int]
"""An edge between periods: its tail, its head, the time between their starts, its lag."""


class Period:
    """Plays periods of one loop.

    Args:
        graph: The loop.
        threads: At most.
        depth: Iterations in flight.

    Attributes:
        us: The interval of the period played last.
        played: How many periods were played.
    """

    def __init__(self, graph: LoopGraph, threads: int, depth: int) -> None:
        self.graph, self.threads, self.depth = graph, threads, depth
        self.us = math.inf
        self.played = 0
        self._work = [self._work_of(v) for v in range(graph.size)]
        rows = {what: row for row, what in enumerate(graph.resources, threads)}
        self._callers_row = rows.get(CALLERS_STREAM, -1)

    def _work_of(self, task: int) -> tuple[_Work, ...]:
        graph, threads, n = self.graph, self.threads, self.graph.size
        into: list[list[_Into]] = [[], []]
        for tail, head, time_us, distance in graph.edges:
            if head % n == task and (tail % n != task or head >= n):
                on_host = graph.handover_us if head < n else 0.0
                into[head // n].append(_Into(tail, tail % n, time_us, distance, on_host))
        held = [
            tuple((threads + hold.what, hold.time_us) for hold in graph.holds[operation])
            for operation in (task, n + task)
        ]
        host = tuple(((lane, graph.host_us[task]), *held[0]) for lane in range(threads))
        work = [_Work(task, tuple(into[0]), host)]
        if graph.streams:
            work.append(_Work(n + task, tuple(into[1]), (held[1],) * threads))
        return tuple(work)

    def play(  # noqa: C901 - one loop, played thousands of times
        self,
        order: Sequence[int],
        lanes: Sequence[int],
        stages: Sequence[int],
        limit_us: float = math.inf,
    ) -> float:
        """Play one period; what it costs: its interval, and a little for what its rows leave idle.

        Args:
            order: The tasks, those of lag 0 in the order of their dependences.
            lanes: Task to its thread.
            stages: Task to its stage.
            limit_us: A period that costs more may be left unplayed: it costs infinity.
        """
        self.played += 1
        rows = self.threads + len(self.graph.resources)
        free, first, last = [0.0] * rows, [-1.0] * rows, [-1] * rows
        at, cause = [0.0] * (2 * len(order)), [-1] * (2 * len(order))
        later: list[_Later] = []
        self._free, self._first, self._last, self._at, self._cause = free, first, last, at, cause
        first[0] = 0.0  # the caller's thread begins with <retire> of the period before
        admit = -1.0 if self.graph.streams else 0.0
        handover = self.graph.handover_us
        new = max(stages) - self.depth + 1  # an iteration ends with its last task, and not later
        for task in order:
            lane, stage = lanes[task], stages[task]
            start = 0.0
            if stage == new:
                if admit < 0:
                    admit = free[0]
                start = admit + handover if lane else admit
            for operation, into, holds in self._work[task]:
                because = -1
                for tail, producer, time_us, distance, over in into:
                    after = time_us + over if over and lanes[producer] != lane else time_us
                    lag = stage - stages[producer] + distance
                    if lag:
                        later.append((tail, operation, after, lag))
                    elif at[tail] + after > start:
                        start, because = at[tail] + after, tail
                for row, _ in holds[lane]:
                    if free[row] > start:
                        start, because = free[row], last[row]
                at[operation], cause[operation] = start, because
                for row, time_us in holds[lane]:
                    free[row], last[row] = start + time_us, operation
                    if first[row] < 0:
                        first[row] = start
                    elif free[row] - first[row] > limit_us:
                        return math.inf
        return self._cost(lanes, stages, admit if admit >= 0 else free[0], later)

    def critical(self) -> list[int]:
        """The tasks that set the interval of the period played last, and what they waited for."""
        operation, found = self._limiting, []
        while operation >= 0:
            found.append(operation % self.graph.size)
            operation = self._cause[operation]
        return found or list(range(self.graph.size))

    def _cost(
        self, lanes: Sequence[int], stages: Sequence[int], admit: float, later: Sequence[_Later]
    ) -> float:
        us, self._limiting = 0.0, self._last[0]
        spread = 0.0
        for row, (free, first) in enumerate(zip(self._free, self._first, strict=True)):
            if first >= 0:
                if row < self.threads:
                    spread += free - first
                if free - first > us:
                    us, self._limiting = free - first, self._last[row]
        at = self._at
        for tail, head, time_us, lag in later:
            if at[tail] + time_us - at[head] > us * lag:
                us, self._limiting = (at[tail] + time_us - at[head]) / lag, tail
        self.us = self._frame(lanes, stages, admit, us)
        return self.us + _SPREAD * spread / self.threads

    def _frame(
        self, lanes: Sequence[int], stages: Sequence[int], admit: float, enough_us: float
    ) -> float:
        """What <admit> and <retire> ask for, where that is more than enough."""
        graph, at, n = self.graph, self._at, self.graph.size
        last = max(stages)
        new = last - self.depth + 1
        host, device, over = graph.host_us, graph.device_us, graph.handover_us
        ends = [at[v] + host[v] + over if lanes[v] else at[v] + host[v] for v in range(n)]
        closed = self._free[0]
        for v, stage in enumerate(stages):
            if stage == last and ends[v] > closed:
                closed = ends[v]
        late = [end - closed for end in ends]
        us = max(enough_us, closed)
        if graph.streams:
            done = closed
            queued = [at[n + v] + device[v] for v in range(n)]
            for v, stage in enumerate(stages):
                if queued[v] > done and (stage == last or graph.stream[v] == 0):
                    done = queued[v]
            late = [max(here, end - done) for here, end in zip(late, queued, strict=True)]
            us = max(us, done + over - admit)
            if self._callers_row >= 0:  # <retire> is the last in the caller's stream
                us = max(us, done - self._first[self._callers_row])
        if admit + over <= us and max(late) <= us:
            return us
        for v, stage in enumerate(stages):
            if stage > new:
                us = max(us, (admit + over - at[v]) / (stage - new))
            if stage < last:
                us = max(us, late[v] / (last - stage))
        return us
