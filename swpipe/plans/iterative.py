"""Iterative modulo scheduling: start times at a given initiation interval, or none.

Tasks are placed by height, the longest way from a task to the end of its iteration when each
distance counts for a period less. A task goes to the first time that its placed predecessors and
the rings of its resources allow. Where a whole period has no such time it is placed all the same;
those in its way, and successors that would begin too soon, are taken out and placed anew. A budget
ends it.

A task has host work and, on a device with streams, device work: the device work goes to the first
time that is free, the host work to the last one before it, so that little is queued. A stream is an
in-order queue: its device work must be in the order of submission.

Two things differ from the book. Times are real, so that "the next time" is the end of an operation
in the way. And on a ring with little to spare an operation is placed beside another one, because a
gap of the wrong length is lost.

Source: B. R. Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops"
(MICRO-27, 1994).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.plans.loop_graph import LoopGraph
from swpipe.plans.reservation import EPS_US, Ring


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start times of one iteration; all others follow ``period_us`` apart.

    Attributes:
        period_us: The initiation interval.
        lanes: Task to the number of its thread; 0 is the caller's.
        host_us: Task to the start of its host work, in microseconds.
        device_us: Task to the start of its device work; without streams the end of its host work.
    """

    period_us: float
    lanes: tuple[int, ...]
    host_us: tuple[float, ...]
    device_us: tuple[float, ...]


def schedule(
    graph: LoopGraph,
    lanes: Sequence[int],
    period_us: float,
    *,
    snug: bool = False,
    nudge: int = 0,
    budget: int = 6,
) -> Schedule | None:
    """Start times at this initiation interval; None where none were found.

    Args:
        graph: What to schedule.
        lanes: Task to its thread.
        period_us: The initiation interval to reach.
        snug: Place operations side by side on rings with little to spare.
        nudge: Tries differ in the order in which tasks are placed; 0 is by height alone.
        budget: Placements per task before giving up.
    """
    heights = _heights(graph, lanes, period_us)
    if heights is None:
        return None
    return _Scheduler(graph, lanes, period_us, heights, snug, nudge).run(budget * graph.size)


def _arcs(graph: LoopGraph, lanes: Sequence[int]) -> list[tuple[int, int, float, int]]:
    n = graph.size
    return [
        (
            tail,
            head,
            time_us
            + (graph.handover_us if max(tail, head) < n and lanes[tail] != lanes[head] else 0),
            distance,
        )
        for tail, head, time_us, distance in graph.edges
    ]


def _heights(graph: LoopGraph, lanes: Sequence[int], period_us: float) -> list[float] | None:
    """Operation to its height; None where a recurrence is too long for the period."""
    heights = [
        graph.time_us(k) if k < graph.size or graph.streams else 0.0 for k in range(2 * graph.size)
    ]
    weights = [(t, h, w - d * period_us) for t, h, w, d in reversed(_arcs(graph, lanes))]
    for _ in range(2 * graph.size + 1):
        changed = False
        for tail, head, weight in weights:
            if heights[head] + weight > heights[tail] + EPS_US:
                heights[tail] = heights[head] + weight
                changed = True
        if not changed:
            return heights
    return None


class _Scheduler:
    def __init__(
        self,
        graph: LoopGraph,
        lanes: Sequence[int],
        period_us: float,
        heights: Sequence[float],
        snug: bool,
        nudge: int,
    ) -> None:
        n = graph.size
        self.graph, self.lanes, self.period_us = graph, tuple(lanes), period_us
        self.into: list[list[tuple[int, float]]] = [[] for _ in range(2 * n)]
        self.out: list[list[tuple[int, float]]] = [[] for _ in range(2 * n)]
        for tail, head, time_us, distance in _arcs(graph, lanes):
            self.into[head].append((tail, time_us - distance * period_us))
            self.out[tail].append((head, time_us - distance * period_us))
        self.at: list[float] = [math.nan] * (2 * n)
        self.before: list[float] = [-math.inf] * n
        self._make_rings(snug)
        self.rank = [(-heights[v] * _wobble(v, nudge), v) for v in range(n)]

    def _make_rings(self, snug: bool) -> None:
        graph, n = self.graph, self.graph.size
        count = len(graph.resources)
        held = [list(hold) for hold in graph.holds]
        uses: list[list[tuple[int, float]]] = [[(h.what, h.time_us) for h in hs] for hs in held]
        for v in range(n):
            uses[v].append((count + self.lanes[v], graph.host_us[v]))
        load = [0.0] * (count + max(self.lanes) + 1)
        for operation in uses:
            for what, time_us in operation:
                load[what] += time_us
        slack = [max(0.0, self.period_us - taken) if snug else math.inf for taken in load]
        self.rings = [Ring(self.period_us, spare) for spare in slack]
        self.uses = [[(self.rings[what], time_us) for what, time_us in use] for use in uses]

    def run(self, budget: int) -> Schedule | None:
        waiting = list(self.rank)
        heapq.heapify(waiting)
        placed: set[int] = set()
        for _ in range(budget):
            if not waiting:
                n = self.graph.size
                return Schedule(self.period_us, self.lanes, tuple(self.at[:n]), tuple(self.at[n:]))
            _, task = heapq.heappop(waiting)
            for other in self._place(task, placed):
                placed.discard(other)
                self._take_out(other)
                heapq.heappush(waiting, self.rank[other])
            placed.add(task)
        return None

    def _place(self, task: int, placed: set[int]) -> set[int]:
        """Place a task; those that must be placed anew because of it."""
        n = self.graph.size
        host_from = self._earliest(task, placed, 0.0)
        device_from = self._earliest(n + task, placed, host_from + self.graph.host_us[task])
        found = self._free(task, host_from, device_from, placed)
        if found is None:
            found = self._forced(task, host_from, device_from)
        host, device = found
        self.before[task] = host
        out = set()
        for operation, start in ((task, host), (n + task, device)):
            self.at[operation] = start
            for ring, time_us in self.uses[operation]:
                out |= {other for other, _, _ in ring.clashes(start, time_us)}
                ring.put(task, start, time_us)
            for head, weight in self.out[operation]:
                other = head % n
                if other != task and other in placed and self.at[head] < start + weight - EPS_US:
                    out.add(other)
        out |= self._out_of_order(task, host, device, placed)
        out.discard(task)
        return out

    def _take_out(self, task: int) -> None:
        for operation in (task, self.graph.size + task):
            for ring, _ in self.uses[operation]:
                ring.taken.pop(task, None)

    def _earliest(self, operation: int, placed: set[int], least: float) -> float:
        n = self.graph.size
        for tail, weight in self.into[operation]:
            if tail % n in placed:
                least = max(least, self.at[tail] + weight)
        return least

    def _forced(self, task: int, host_from: float, device_from: float) -> tuple[float, float]:
        host_us = self.graph.host_us[task]
        host = host_from
        if self.before[task] >= host - EPS_US:
            later = [
                ring.later_us(self.before[task] + 2 * EPS_US, time_us)
                for ring, time_us in self.uses[task]
            ]
            step = min(
                (x for x in later if x > EPS_US), default=self.period_us / (2 * self.graph.size)
            )
            host = self.before[task] + step
        return host, max(device_from, host + host_us)

    # ------------------------------------------------------------- free times

    def _free(
        self, task: int, host_from: float, device_from: float, placed: set[int]
    ) -> tuple[float, float] | None:
        host_us, n = self.graph.host_us[task], self.graph.size
        until = host_from + self.period_us
        first_host = self._first(task, host_from, until)
        if first_host is None:
            return None
        if not self.graph.streams:
            return first_host, first_host + host_us
        device = max(device_from, first_host + host_us)
        until = device + self.period_us
        while (found := self._first(n + task, device, until)) is not None:
            host = self._last(task, found - host_us, first_host)
            if not self._out_of_order(task, host, found, placed):
                return host, found
            device = self._next(n + task, found)
        return None

    def _first(self, operation: int, start: float, until: float) -> float | None:
        """The first time from ``start`` on at which all its rings are free."""
        while start < until + EPS_US:
            later = 0.0
            for ring, time_us in self.uses[operation]:
                later = max(later, ring.later_us(start, time_us))
            if later <= EPS_US:
                for ring, time_us in self.uses[operation]:
                    later = max(later, ring.snug_us(start, time_us))
                if later <= EPS_US:
                    return start
            start += later
        return None

    def _last(self, operation: int, start: float, least: float) -> float:
        """The last time up to ``start`` at which all its rings are free; ``least`` is free."""
        while start > least + EPS_US:
            sooner = 0.0
            for ring, time_us in self.uses[operation]:
                sooner = max(sooner, ring.sooner_us(start, time_us))
            if sooner <= EPS_US:
                return start
            start -= sooner
        return least

    def _next(self, operation: int, start: float) -> float:
        """The next time after ``start`` that is worth a try: the end of somebody's turn."""
        period = self.period_us
        ends = [
            (begin + length - start) % period
            for ring, _ in self.uses[operation]
            for begin, length in ring.taken.values()
        ]
        return start + min((e for e in ends if e > EPS_US), default=period)

    def _out_of_order(self, task: int, host: float, device: float, placed: set[int]) -> set[int]:
        """Placed tasks of the same stream whose device work is not in the order of submission."""
        graph, period = self.graph, self.period_us
        if not graph.streams:
            return set()
        n, stream = graph.size, graph.stream[task]
        out = set()
        for other in placed:
            if graph.stream[other] == stream and other != task:
                turns = math.floor((host - self.at[other] + EPS_US) / period)
                apart = device - self.at[n + other] - turns * period
                if not -EPS_US <= apart <= period + EPS_US:
                    out.add(other)
        return out


def _wobble(task: int, nudge: int) -> float:
    """A factor around 1 that differs from task to task, and is the same in every run."""
    return 1.0 + 0.5 * (((task * 2654435761 + nudge * 40503) >> 7) % 101 / 100 - 0.5) * min(
        nudge, 1
    )
