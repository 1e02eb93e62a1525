"""Play a timed graph out: when each turn of a run of so many iterations begins and ends.

    ready ──> begins at once                           nothing about it is contended
          ──> stands in line, in the order of being ready ──> begins
              (for its resources, then for the interpreter lock; to the caller's stream, where
              several threads submit there, in the order of submitting)

A turn whose predecessors have all ended is ready, and unless it is contended its end is known there
and then, however far ahead in time. Contended ones wait in a heap until nothing else can be
computed. The earliest of them may go: whatever is not computed yet comes after one that stands in
the heap, and so is ready no sooner. So only they are put in order of time.

Turns of iterations that do not exist, before the first and after the last, take no time; lanes go
through them and do their host waits, as in the engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from swpipe.plans.simulation.timed_graph import LOCK, Node, TimedGraph


@dataclass(frozen=True, slots=True)
class Playout:
    """What was played. Turn ``period * nodes + node`` is a node's turn in a period.

    Attributes:
        graph: Of the program.
        iterations: How many there were.
        start: Turn to ticks from the first period's begin: it held all that it needs.
        end: Turn to ticks.
        bound_by: Turn to the turn that ended last of those it had to wait for; -1 for none.
    """

    graph: TimedGraph
    iterations: int
    start: Sequence[int]
    end: Sequence[int]
    bound_by: Sequence[int]

    def turn(self, node: int, iteration: int) -> int:
        """The turn of a node on an iteration."""
        nodes = self.graph.nodes
        return (iteration + nodes[node].stage) * len(nodes) + node

    def retired(self, iteration: int) -> int:
        """When an iteration's end came, in ticks."""
        return self.end[self.turn(self.graph.retire, iteration)]


def play(graph: TimedGraph, iterations: int) -> Playout:
    """Run so many iterations, from fill to drain."""
    return _Player(graph, iterations).play()


class _Wish(IntEnum):
    SUBMIT = 0
    HOLD = 1
    LOCK = 2


_HELD = None
"""When a resource is free whose holder still stands in line for the lock: not known yet."""


class _Player:
    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.graph, self.iterations = graph, iterations
        self.size = len(graph.nodes)
        self.periods = iterations + graph.depth - 1
        turns = self.size * self.periods
        self.ready = [0] * turns
        self.bound_by = [-1] * turns
        self.start = [0] * turns
        self.end = [-1] * turns
        self.out = _outgoing(graph)
        self.pending = self._pending()
        # Of contention:
        self.heap: list[tuple[int, int, _Wish]] = []
        self.free: dict[str, int | None] = {}
        self.holder: dict[str, int] = {}
        self.parked: dict[str, list[tuple[int, int, _Wish]]] = {}
        self.tail = -1  # the last turn in the caller's stream
        self.behind: dict[int, int] = {}

    def play(self) -> Playout:
        settle = [turn for turn in range(self.size) if not self.pending[turn]]
        while True:
            self._settle(settle)
            if not self.heap:
                break
            settle = self._serve(*heapq.heappop(self.heap))
        return Playout(self.graph, self.iterations, self.start, self.end, self.bound_by)

    def _exists(self, node: int, period: int) -> bool:
        return 0 <= period - self.graph.nodes[node].stage < self.iterations

    def _pending(self) -> list[int]:
        """How many ends each turn waits for."""
        arcs, nodes = self.graph.arcs, self.graph.nodes
        fixed = arcs[: len(arcs) - self.graph.optional]
        optional = arcs[len(fixed) :]
        most = max((arc.distance for arc in arcs), default=0)
        steady = [0] * self.size
        for arc in arcs:
            steady[arc.head] += 1
        # Full periods: all stages have an iteration, and had one as far back as any arc reaches.
        first, last = most + self.graph.depth, self.iterations - 1
        pending: list[int] = []
        for period in range(self.periods):
            if first <= period <= last:
                counts = steady
            else:
                counts = [0] * self.size
                for arc in fixed:
                    counts[arc.head] += arc.distance <= period
                for arc in optional:
                    counts[arc.head] += self._binds(arc.tail, arc.head, period, arc.distance)
            pending += counts
        for node in self.graph.queue:  # one more: the turn ahead of it in the queue
            stage = nodes[node].stage
            for period in range(stage, stage + self.iterations):
                pending[period * self.size + node] += 1
        return pending

    def _binds(self, tail: int, head: int, period: int, lag: int) -> bool:
        return self._exists(head, period) and self._exists(tail, period - lag)

    # ------------------------------------------------------------- uncontended

    def _settle(self, stack: list[int]) -> None:
        """Compute all turns that follow from those on the stack, but for the contended ones."""
        size, nodes, total, turns = self.size, self.graph.nodes, self.iterations, len(self.end)
        ready, pending, end, bound_by = self.ready, self.pending, self.end, self.bound_by
        while stack:
            turn = stack.pop()
            period, k = divmod(turn, size)
            node = nodes[k]
            iteration = period - node.stage
            exists = 0 <= iteration < total
            if end[turn] < 0:
                if exists and (node.resources or node.lock):
                    wish = _Wish.HOLD if node.resources else _Wish.LOCK
                    heapq.heappush(self.heap, (ready[turn], turn, wish))
                    continue
                self.start[turn] = ready[turn]
                end[turn] = ready[turn] + node.time if exists else ready[turn]
            ended = end[turn]
            for ahead, extra, distance in self.out[k]:
                other = turn + ahead
                if other >= turns:
                    continue
                if distance is not None and not (exists and 0 <= iteration + distance < total):
                    continue
                time = ended + extra
                if time > ready[other]:
                    ready[other] = time
                    bound_by[other] = turn
                pending[other] -= 1
                if not pending[other]:
                    stack.append(other)
            if self.graph.queue:
                stack += self._queued(turn, k, period)

    # --------------------------------------------------------------- contended

    def _serve(self, time: int, turn: int, wish: _Wish) -> list[int]:
        """Grant the earliest wish; the turns that can be computed now."""
        if wish is _Wish.SUBMIT:
            return self._submit(turn)
        node = self.graph.nodes[turn % self.size]
        if wish is _Wish.HOLD:
            for resource in node.resources:
                if self.free.get(resource, 0) is _HELD:
                    self.parked.setdefault(resource, []).append((time, turn, wish))
                    return []
            begin = max([time, *(self.free.get(r, 0) or 0 for r in node.resources)])
            self._blame(turn, time, begin, node.resources)
            if node.lock:
                self.free |= dict.fromkeys(node.resources, _HELD)
                heapq.heappush(self.heap, (begin, turn, _Wish.LOCK))
                return []
        else:
            begin = max(time, self.free.get(LOCK, 0) or 0)
            self._blame(turn, time, begin, (LOCK,))
        self._begin(turn, node, begin)
        return [turn]

    def _begin(self, turn: int, node: Node, begin: int) -> None:
        self.start[turn] = begin
        self.end[turn] = begin + node.time
        if node.lock:
            self.free[LOCK] = begin + node.lock
            self.holder[LOCK] = turn
        for resource in node.resources:
            self.free[resource] = self.end[turn]
            self.holder[resource] = turn
            for waiting in self.parked.pop(resource, ()):
                heapq.heappush(self.heap, waiting)

    def _blame(self, turn: int, asked: int, begin: int, resources: Sequence[str]) -> None:
        for resource in resources:
            if begin > asked and (self.free.get(resource, 0) or 0) == begin:
                self.bound_by[turn] = self.holder[resource]

    # ------------------------------------------------------ the caller's stream

    def _queued(self, turn: int, k: int, period: int) -> list[int]:
        """What a turn's end means for the caller's stream; the turns it lets go on."""
        device = self.graph.device_of.get(k, -1)
        if device in self.graph.queue and self._exists(device, period):
            submitted = period * self.size + device
            heapq.heappush(self.heap, (self.end[turn], submitted, _Wish.SUBMIT))
        behind = self.behind.pop(turn, -1)
        return self._follow(turn, behind) if behind >= 0 else []

    def _submit(self, turn: int) -> list[int]:
        ahead, self.tail = self.tail, turn
        if ahead >= 0 and self.end[ahead] < 0:
            self.behind[ahead] = turn
            return []
        return self._follow(ahead, turn)

    def _follow(self, ahead: int, turn: int) -> list[int]:
        if ahead >= 0 and self.end[ahead] > self.ready[turn]:
            self.ready[turn] = self.end[ahead]
            self.bound_by[turn] = ahead
        self.pending[turn] -= 1
        return [] if self.pending[turn] else [turn]


class _Out(NamedTuple):
    """An arc as its tail's turns see it."""

    ahead: int
    """From the tail's turn to the head's."""

    extra: int
    """Ticks on top of the tail's own time."""

    distance: int | None
    """For arcs that bind only where both iterations exist: from the tail's to the head's."""


def _outgoing(graph: TimedGraph) -> list[list[_Out]]:
    out: list[list[_Out]] = [[] for _ in graph.nodes]
    nodes, first_optional = graph.nodes, len(graph.arcs) - graph.optional
    for number, (tail, head, time, lag) in enumerate(graph.arcs):
        distance = lag - nodes[head].stage + nodes[tail].stage
        out[tail].append(
            _Out(
                ahead=lag * len(nodes) + head - tail,
                extra=time - nodes[tail].time,
                distance=distance if number >= first_optional else None,
            )
        )
    return out
