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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.plans.loop_graph import LoopGraph
from swpipe.plans.reservation import EPS_US, Ring

_ADMIT = -1
"""Where a period begins: nothing on the caller's thread crosses it."""


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


class Attempt(NamedTuple):
    """What came of looking for start times.

    Attributes:
        times: None where none were found.
        placements: How many it took: what looking costs.
    """

    times: Schedule | None
    placements: int


def schedule(
    graph: LoopGraph,
    allowed: Sequence[Sequence[int]],
    period_us: float,
    depth: int,
    *,
    snug: bool = False,
    anchored: bool = False,
    nudge: int = 0,
    budget: int,
) -> Attempt:
    """Look for start times at this initiation interval.

    Args:
        graph: What to schedule.
        allowed: Task to the threads that it may run on; the first that is free soonest takes it.
        period_us: The initiation interval to reach.
        depth: Iterations in flight at most: a task that would end later is placed anew.
        snug: Place operations side by side on rings with little to spare.
        anchored: Let a period begin with an iteration: of all plans one is anchored, but a
            schedule that is not may have a better place to begin.
        nudge: Tries differ in the order in which tasks are placed; 0 is by height alone.
        budget: Placements before giving up.
    """
    heights = _heights(graph, period_us)
    if heights is None:
        return Attempt(None, 0)
    scheduler = _Scheduler(graph, allowed, period_us, heights, snug, nudge)
    if anchored:
        scheduler.threads[0].put(_ADMIT, 0.0, 0.0)
    scheduler.latest = [depth * period_us - height for height in heights]
    return scheduler.run(budget)


def _heights(graph: LoopGraph, period_us: float) -> list[float] | None:
    """Operation to its height; None where a recurrence is too long for the period."""
    n = graph.size
    heights = [*graph.host_us, *graph.device_us]
    weights = [(e.tail, e.head, e.time_us - e.distance * period_us) for e in reversed(graph.edges)]
    for _ in range(2 * n + 1):
        changed = False
        for tail, head, weight in weights:
            if heights[head] + weight > heights[tail] + EPS_US:
                heights[tail] = heights[head] + weight
                changed = True
        if not changed:
            return heights
    return None


class _Spot(NamedTuple):
    """Where a task may go: its thread, and the starts of its host and device work."""

    lane: int
    host: float
    device: float


class _Scheduler:
    def __init__(
        self,
        graph: LoopGraph,
        allowed: Sequence[Sequence[int]],
        period_us: float,
        heights: Sequence[float],
        snug: bool,
        nudge: int,
    ) -> None:
        n = graph.size
        self.n, self.graph, self.allowed, self.period_us = n, graph, allowed, period_us
        self.into: list[list[tuple[int, float]]] = [[] for _ in range(2 * n)]
        self.out: list[list[tuple[int, float]]] = [[] for _ in range(2 * n)]
        for tail, head, time_us, distance in graph.edges:
            self.into[head].append((tail, time_us - distance * period_us))
            self.out[tail].append((head, time_us - distance * period_us))
        self.at: list[float] = [0.0] * (2 * n)
        self.lane: list[int] = [0] * n
        self.placed: set[int] = set()
        self.queued: dict[int, set[int]] = defaultdict(set)
        self.before: list[float] = [-math.inf] * n
        self.snug = snug
        self._make_rings(snug)
        self.latest: Sequence[float] = [math.inf] * (2 * n)
        self.rank = [(-heights[v] * _wobble(v, nudge), v) for v in range(n)]

    def _make_rings(self, snug: bool) -> None:
        graph, period = self.graph, self.period_us
        threads = max(max(lanes) for lanes in self.allowed) + 1
        load = [0.0] * len(graph.resources)
        for holds in graph.holds:
            for what, time_us in holds:
                load[what] += time_us
        spare = [max(0.0, period - taken) if snug else math.inf for taken in load]
        rings = [Ring(period, slack) for slack in spare]
        self.uses = [[(rings[what], time_us) for what, time_us in hs] for hs in graph.holds]
        idle = max(0.0, period - sum(graph.host_us) / threads) if snug else math.inf
        self.threads = [Ring(period, idle) for _ in range(threads)]

    def run(self, budget: int) -> Attempt:
        waiting = list(self.rank)
        heapq.heapify(waiting)
        for used in range(budget):
            if not waiting:
                n = self.n
                times = Schedule(
                    self.period_us, tuple(self.lane), tuple(self.at[:n]), tuple(self.at[n:])
                )
                return Attempt(times, used)
            _, task = heapq.heappop(waiting)
            for other in self._put(task, self._spot(task)):
                self._take_out(other)
                heapq.heappush(waiting, self.rank[other])
        return Attempt(None, budget)

    def _put(self, task: int, spot: _Spot) -> set[int]:
        """Place a task; those that must be placed anew because of it."""
        n, out = self.n, set()
        self.lane[task], self.before[task] = spot.lane, spot.host
        for operation, start in ((task, spot.host), (n + task, spot.device)):
            self.at[operation] = start
            for ring, time_us in self._rings(operation, spot.lane):
                out |= ring.clashing(start, time_us) - {_ADMIT}
                ring.put(task, start, time_us)
            for head, weight in self.out[operation]:
                other = head % n
                if other in self.placed and other != task:
                    handover = self._handover(operation, head, spot.lane, self.lane[other])
                    if self.at[head] < start + weight + handover - EPS_US:
                        out.add(other)
        out |= self._out_of_order(task, spot.host, spot.device)
        out.discard(task)
        self.placed.add(task)
        self.queued[self.graph.stream[task]].add(task)
        return out

    def _take_out(self, task: int) -> None:
        self.placed.discard(task)
        self.queued[self.graph.stream[task]].discard(task)
        for operation in (task, self.n + task):
            for ring, _ in self._rings(operation, self.lane[task]):
                ring.taken.pop(task, None)

    def _rings(self, operation: int, lane: int) -> list[tuple[Ring, float]]:
        if operation >= self.n:
            return self.uses[operation]
        return [*self.uses[operation], (self.threads[lane], self.graph.host_us[operation])]

    def _handover(self, tail: int, head: int, tail_lane: int, head_lane: int) -> float:
        n = self.n
        return self.graph.handover_us if tail < n and head < n and tail_lane != head_lane else 0.0

    def _earliest(self, operation: int, lane: int, least: float) -> float:
        n, handover_us = self.n, self.graph.handover_us
        for tail, weight in self.into[operation]:
            if tail % n in self.placed:
                start = self.at[tail] + weight
                if handover_us:
                    start += self._handover(tail, operation, self.lane[tail % n], lane)
                if start > least:
                    least = start
        return least

    # ------------------------------------------------------------------ spots

    def _spot(self, task: int) -> _Spot:
        """The best free spot, or one that others have to leave."""
        best: _Spot | None = None
        best_end = math.inf
        for lane in self.allowed[task]:
            spot = self._free(task, lane)
            if spot is not None and spot.device < best_end - EPS_US:
                best, best_end = spot, spot.device
        return best if best is not None else self._forced(task)

    def _forced(self, task: int) -> _Spot:
        lanes = self.allowed[task]
        lane = min(lanes, key=lambda k: (len(self.threads[k].taken), k))
        host_us = self.graph.host_us[task]
        host = self._earliest(task, lane, 0.0)
        if self.before[task] >= host - EPS_US:
            later = [
                ring.later_us(self.before[task] + 2 * EPS_US, time_us)
                for ring, time_us in self._rings(task, lane)
            ]
            a_step = self.period_us / (2 * self.n)
            host = self.before[task] + min((x for x in later if x > EPS_US), default=a_step)
        device = self._earliest(self.n + task, lane, host + host_us)
        return _Spot(lane, host, device)

    def _free(self, task: int, lane: int) -> _Spot | None:
        host_us, device_op = self.graph.host_us[task], self.n + task
        host_rings = self._rings(task, lane)
        host_from = self._earliest(task, lane, 0.0)
        until = min(host_from + self.period_us, self.latest[task])
        first_host = self._first(host_rings, host_from, until)
        if first_host is None:
            return None
        if not self.graph.streams:
            return _Spot(lane, first_host, first_host + host_us)
        device_rings = self.uses[device_op]
        device = self._earliest(device_op, lane, first_host + host_us)
        until = min(device + self.period_us, self.latest[device_op])
        while (found := self._first(device_rings, device, until)) is not None:
            # Later would queue less, but tear a gap into a thread that has none to spare.
            late = first_host if self.snug else found - host_us
            host = self._last(host_rings, late, first_host)
            if not self._out_of_order(task, host, found):
                return _Spot(lane, host, found)
            device = self._next(device_rings, found)
        return None

    def _first(
        self, rings: Sequence[tuple[Ring, float]], start: float, until: float
    ) -> float | None:
        """The first time from ``start`` on at which all the rings are free."""
        while start < until + EPS_US:
            later = 0.0
            for ring, time_us in rings:
                later = max(later, ring.later_us(start, time_us))
            if later <= EPS_US:
                for ring, time_us in rings:
                    later = max(later, ring.snug_us(start, time_us))
                if later <= EPS_US:
                    return start
            start += later
        return None

    def _last(self, rings: Sequence[tuple[Ring, float]], start: float, least: float) -> float:
        """The last time up to ``start`` at which all the rings are free; ``least`` is free."""
        while start > least + EPS_US:
            sooner = 0.0
            for ring, time_us in rings:
                sooner = max(sooner, ring.sooner_us(start, time_us))
            if sooner <= EPS_US:
                return start
            start -= sooner
        return least

    def _next(self, rings: Sequence[tuple[Ring, float]], start: float) -> float:
        """The next time after ``start`` that is worth a try: the end of somebody's turn."""
        period = self.period_us
        ends = [
            (begin + length - start) % period
            for ring, _ in rings
            for begin, length in ring.taken.values()
        ]
        return start + min((e for e in ends if e > EPS_US), default=period)

    def _out_of_order(self, task: int, host: float, device: float) -> set[int]:
        """Placed tasks of the same stream whose device work is not in the order of submission."""
        if not self.graph.streams:
            return set()
        n, at, period, out = self.n, self.at, self.period_us, set()
        for other in self.queued[self.graph.stream[task]]:
            turns = (host - at[other] + EPS_US) // period
            apart = device - at[n + other] - turns * period
            if (apart < -EPS_US or apart > period + EPS_US) and other != task:
                out.add(other)
        return out


def _wobble(task: int, nudge: int) -> float:
    """A factor around 1 that differs from task to task, and is the same in every run."""
    return 1.0 + 0.5 * (((task * 2654435761 + nudge * 40503) >> 7) % 101 / 100 - 0.5) * min(
        nudge, 1
    )
