"""Iterative modulo scheduling: start times at a given initiation interval, or none.

Tasks are placed by height, the longest way from a task to the end of its iteration when each
distance counts for a period less. A task goes to the first time that its placed predecessors and
the tables of its resources allow. Where a whole period has no such time it is placed all the same;
those in its way, and successors that would begin too soon, are taken out and placed anew. A budget
ends it.

A task has host work and, on a device with streams, device work: the device work goes to the first
time that is free, the host work to the last one before it, so that little is queued. A stream is an
in-order queue: its device work must be in the order of submission.

A period has a fixed number of slots (``reservation``), and times are rounded down to
whole ones: what fits into the period then fits into the slots, however full it is. So start times
are about right, which is enough: a plan takes nothing from them but an order.

A look may begin from start times that were found for a longer interval: a part of them is taken
out, the rest stays where it stood in the period as far as it fits there ("large neighbourhood
search"; Shaw 1998).

Source: B. R. Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops"
(MICRO-27, 1994).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from swpipe.plans.modulo.loop_graph import LoopGraph
from swpipe.plans.modulo.reservation import Starts, Table

_ADMIT = -1
"""Where a period begins: nothing on the caller's thread crosses it."""

_NEVER = 1 << 60

_WIDE = 20
"""In loops of more tasks than this, looks differ less."""

_LEFT_OUT = 4
"""Of the tasks that a seed has, every so many is left out."""

_SLOTS_PER_TASK = 32
_FEWEST_SLOTS, _MOST_SLOTS = 256, 2048


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start times of one iteration; all others follow ``period_us`` apart.

    Attributes:
        period_us: The initiation interval.
        lanes: Task to the number of its thread; 0 is the caller's.
        host_us: Task to the start of its host work, in microseconds.
        device_us: Task to the start of its device work; without streams the end of its host work.
        blur_us: By less than this may a start be too soon: times were rounded down.
    """

    period_us: float
    lanes: tuple[int, ...]
    host_us: tuple[float, ...]
    device_us: tuple[float, ...]
    blur_us: float = 0.0


class Attempt(NamedTuple):
    """What came of looking for start times.

    Attributes:
        times: None where none were found.
        placements: How many it took: what looking costs.
    """

    times: Schedule | None
    placements: int


@dataclass(frozen=True, slots=True)
class Slotted:
    """A loop at one initiation interval, in slots. Operations are numbered as in the graph.

    Attributes:
        graph: The loop.
        period_us: The initiation interval.
        slots: Of a period.
        time: Operation to its slots.
        holds: Operation to (what it holds, slots).
        into: Operation to (tail, least slots between the two starts).
        out: Operation to (head, least slots between the two starts).
        heights: Operation to the slots from its start to the end of its iteration.
        handover: Slots that a wait for another thread takes.
    """

    graph: LoopGraph
    period_us: float
    slots: int
    time: tuple[int, ...]
    holds: tuple[tuple[tuple[int, int], ...], ...]
    into: tuple[tuple[tuple[int, int], ...], ...]
    out: tuple[tuple[tuple[int, int], ...], ...]
    heights: tuple[int, ...]
    handover: int

    @classmethod
    def of(cls, graph: LoopGraph, period_us: float) -> Self | None:
        """The loop at this interval; None where a recurrence is too long for it."""
        n = graph.size
        slots = min(_MOST_SLOTS, max(_FEWEST_SLOTS, _SLOTS_PER_TASK * n))
        per_us = slots / period_us

        def in_slots(us: float) -> int:
            return int(us * per_us + 1e-6)

        time = tuple(in_slots(us) for us in (*graph.host_us, *graph.device_us))
        into: list[list[tuple[int, int]]] = [[] for _ in range(2 * n)]
        out: list[list[tuple[int, int]]] = [[] for _ in range(2 * n)]
        for tail, head, time_us, distance in graph.edges:
            least = in_slots(time_us) - distance * slots
            into[head].append((tail, least))
            out[tail].append((head, least))
        heights = _heights(time, out)
        if heights is None:
            return None
        return cls(
            graph,
            period_us,
            slots,
            time,
            tuple(tuple((what, in_slots(us)) for what, us in holds) for holds in graph.holds),
            tuple(map(tuple, into)),
            tuple(map(tuple, out)),
            heights,
            in_slots(graph.handover_us),
        )


def _heights(
    time: Sequence[int], out: Sequence[Sequence[tuple[int, int]]]
) -> tuple[int, ...] | None:
    heights = list(time)
    for _ in range(len(time) + 1):
        changed = False
        for tail in range(len(time) - 1, -1, -1):
            for head, least in out[tail]:
                if heights[head] + least > heights[tail]:
                    heights[tail] = heights[head] + least
                    changed = True
        if not changed:
            return tuple(heights)
    return None


def schedule(
    loop: Slotted,
    allowed: Sequence[Sequence[int]],
    depth: int,
    *,
    anchored: bool = False,
    nudge: int = 0,
    seed: Schedule | None = None,
    budget: int,
) -> Attempt:
    """Look for start times.

    Args:
        loop: What to schedule, at which interval.
        allowed: Task to the threads that it may run on; the first that is free soonest takes it.
        depth: Iterations in flight at most: a task that would end later is placed anew.
        anchored: Let a period begin with an iteration: of all plans one is anchored, but a
            schedule that is not may have a better place to begin.
        nudge: Looks differ in the order in which tasks are placed; 0 is by height alone.
        seed: Start times at another interval: tasks begin where they stood in the period, but for
            those that do not fit there any more, and a few others.
        budget: Placements before giving up.
    """
    scheduler = _Scheduler(loop, allowed, depth, nudge)
    if anchored:
        scheduler.threads[0].put(_ADMIT, 0, 1)
    if seed is not None:
        scheduler.sow(seed, nudge)
    return scheduler.run(budget)


class _Spot(NamedTuple):
    """Where a task may go: its thread, and the starts of its host and device work."""

    lane: int
    host: int
    device: int


class _Turn(NamedTuple):
    """A place in a stream's queue.

    Attributes:
        opens: The device work before it is done then.
        closes: The last start of its own that does not run into the one behind it.
        next: When the one behind it is submitted.
    """

    opens: int
    closes: int
    next: int


class _Scheduler:
    def __init__(
        self, loop: Slotted, allowed: Sequence[Sequence[int]], depth: int, nudge: int
    ) -> None:
        graph = loop.graph
        n = graph.size
        self.n, self.loop, self.allowed = n, loop, allowed
        self.at = [0] * (2 * n)
        self.lane = [0] * n
        self.placed: set[int] = set()
        self.queued: dict[int, set[int]] = defaultdict(set)
        self.before = [-1] * n
        self.latest = [depth * loop.slots - height for height in loop.heights]
        self.rank = [(-(loop.heights[v] + 1) * _wobble(v, nudge, n), v) for v in range(n)]
        tables = [Table(loop.slots) for _ in graph.resources]
        self.uses = [[(tables[what], time) for what, time in holds] for holds in loop.holds]
        threads = max(max(lanes) for lanes in allowed) + 1
        self.threads = [Table(loop.slots) for _ in range(threads)]

    def sow(self, seed: Schedule, nudge: int) -> None:
        """Place tasks where they stood, as far as they fit; every fourth or so is left out."""
        n, per_us = self.n, self.loop.slots / seed.period_us
        for task in sorted(range(n), key=lambda v: seed.host_us[v]):
            host = round(seed.host_us[task] * per_us)
            device = max(round(seed.device_us[task] * per_us), host + self.loop.time[task])
            if _mix(task, nudge) % _LEFT_OUT and seed.lanes[task] in self.allowed[task]:
                spot = _Spot(seed.lanes[task], host, device)
                if self._fits(task, spot):
                    self._put(task, spot)

    def _fits(self, task: int, spot: _Spot) -> bool:
        n = self.n
        for operation, start in ((task, spot.host), (n + task, spot.device)):
            if start > self.latest[operation]:
                return False
            if self._earliest(operation, spot.lane, start) > start:
                return False
            for head, least in self.loop.out[operation]:
                if head % n in self.placed and self.at[head] < start + least:
                    return False
            for table, time in self._tables(operation, spot.lane):
                if table.clashing(start, time):
                    return False
        return not self._out_of_order(task, spot.host, spot.device)

    def run(self, budget: int) -> Attempt:
        waiting = [rank for v, rank in enumerate(self.rank) if v not in self.placed]
        heapq.heapify(waiting)
        for used in range(budget):
            if not waiting:
                return Attempt(self._times(), used)
            _, task = heapq.heappop(waiting)
            for other in self._put(task, self._spot(task)):
                self._take_out(other)
                heapq.heappush(waiting, self.rank[other])
        return Attempt(None, budget)

    def _times(self) -> Schedule:
        n, unit = self.n, self.loop.period_us / self.loop.slots
        return Schedule(
            self.loop.period_us,
            tuple(self.lane),
            tuple(at * unit for at in self.at[:n]),
            tuple(at * unit for at in self.at[n:]),
            unit,
        )

    def _put(self, task: int, spot: _Spot) -> set[int]:
        """Place a task; those that must be placed anew because of it."""
        n, out = self.n, set()
        self.lane[task], self.before[task] = spot.lane, spot.host
        for operation, start in ((task, spot.host), (n + task, spot.device)):
            self.at[operation] = start
            for table, time in self._tables(operation, spot.lane):
                out |= table.clashing(start, time)
            for head, least in self.loop.out[operation]:
                other = head % n
                if other in self.placed and other != task:
                    handover = self._handover(operation, head, spot.lane, self.lane[other])
                    if self.at[head] < start + least + handover:
                        out.add(other)
        out |= self._out_of_order(task, spot.host, spot.device)
        out -= {task, _ADMIT}
        self.placed.add(task)
        self.queued[self.loop.graph.stream[task]].add(task)
        for other in out:
            self._clear(other)
        for operation, start in ((task, spot.host), (n + task, spot.device)):
            for table, time in self._tables(operation, spot.lane):
                table.put(task, start, time)
        return out

    def _clear(self, task: int) -> None:
        for operation in (task, self.n + task):
            for table, _ in self._tables(operation, self.lane[task]):
                table.free(task)

    def _take_out(self, task: int) -> None:
        self.placed.discard(task)
        self.queued[self.loop.graph.stream[task]].discard(task)

    def _tables(self, operation: int, lane: int) -> list[tuple[Table, int]]:
        if operation >= self.n:
            return self.uses[operation]
        return [*self.uses[operation], (self.threads[lane], self.loop.time[operation])]

    def _handover(self, tail: int, head: int, tail_lane: int, head_lane: int) -> int:
        n = self.n
        return self.loop.handover if tail < n and head < n and tail_lane != head_lane else 0

    def _earliest(self, operation: int, lane: int, least: int) -> int:
        n, handover = self.n, self.loop.handover
        for tail, apart in self.loop.into[operation]:
            if tail % n in self.placed:
                start = self.at[tail] + apart
                if handover:
                    start += self._handover(tail, operation, self.lane[tail % n], lane)
                if start > least:
                    least = start
        return least

    # ------------------------------------------------------------------ spots

    def _spot(self, task: int) -> _Spot:
        """The best free spot, or one that others have to leave."""
        best: _Spot | None = None
        for lane in self.allowed[task]:
            spot = self._free(task, lane)
            if spot is not None and (best is None or spot.device < best.device):
                best = spot
        return best if best is not None else self._forced(task)

    def _forced(self, task: int) -> _Spot:
        lanes = self.allowed[task]
        lane = min(lanes, key=lambda k: (len(self.threads[k].taken), k))
        host, before = self._earliest(task, lane, 0), self.before[task]
        if host <= before:
            # Where one of the tables at least is free: the others' tasks have to leave.
            later = [self._starts([use]).after(before + 1) for use in self._tables(task, lane)]
            a_step = before + max(1, self.loop.slots // (2 * self.n))
            host = min((x for x in later if x is not None and x > before + 1), default=a_step)
        device = self._earliest(self.n + task, lane, host + self.loop.time[task])
        return _Spot(lane, host, device)

    def _free(self, task: int, lane: int) -> _Spot | None:
        n, time = self.n, self.loop.time[task]
        free = self._starts(self._tables(task, lane))
        first = free.after(self._earliest(task, lane, 0))
        if first is None or first > self.latest[task]:
            return None
        if not self.loop.graph.streams:
            return _Spot(lane, first, first + time)
        on_device = self._starts(self.uses[n + task])
        host, until = first, min(first + self.loop.slots, self.latest[task] + 1)
        while host < until:
            turn = self._turn(task, host)
            device = on_device.after(max(turn.opens, self._earliest(n + task, lane, host + time)))
            if device is not None and device <= min(turn.closes, self.latest[n + task]):
                late = max(host, free.before(device - time))
                # Later, and so with less queued; but not behind somebody else's turn.
                return _Spot(lane, late if late < turn.next else host, device)
            later = free.after(max(turn.next, host + 1))
            host = until if later is None else later
        return None

    def _turn(self, task: int, host: int) -> _Turn:
        """Where the device work must be if it is submitted then: streams are in-order queues."""
        n, at, slots, time = self.n, self.at, self.loop.slots, self.loop.time
        opens, closes, following = 0, _NEVER, _NEVER
        for other in self.queued[self.loop.graph.stream[task]]:
            submitted = at[other]
            turns = (host - submitted) // slots * slots
            begins = at[n + other] + turns
            if begins + time[n + other] > opens:
                opens = begins + time[n + other]
            if begins < closes:
                closes = begins
            if submitted + turns < following:
                following = submitted + turns
        return _Turn(opens, closes + slots - time[n + task], following + slots)

    def _starts(self, tables: Sequence[tuple[Table, int]]) -> Starts:
        blocked = 0
        for table, time in tables:
            blocked |= table.blocked(time)
        return Starts(self.loop.slots, blocked)

    def _out_of_order(self, task: int, host: int, device: int) -> set[int]:
        """Placed tasks of the same stream whose device work is not in the order of submission."""
        if not self.loop.graph.streams:
            return set()
        n, at, slots, out = self.n, self.at, self.loop.slots, set()
        for other in self.queued[self.loop.graph.stream[task]]:
            turns = (host - at[other]) // slots
            apart = device - at[n + other] - turns * slots
            if not 0 <= apart <= slots and other != task:
                out.add(other)
        return out


def _mix(task: int, nudge: int) -> int:
    """A number that looks like chance, and is the same in every run."""
    mixed = (task * 0x9E3779B1 + nudge * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 0x85EBCA6B) & 0xFFFFFFFF
    return mixed ^ mixed >> 13


def _wobble(task: int, nudge: int, size: int) -> float:
    """A factor that differs from task to task: from 0.5 to 1.5, but nearer to 1 in long loops."""
    width = min(1.0, _WIDE / size) if nudge else 0.0
    return 1.0 + width * (_mix(task, nudge) % 1000 / 1000 - 0.5)
