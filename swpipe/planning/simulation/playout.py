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

A run may be endless: it is played as far as somebody asks for. Retirement holds back admission, so
nothing gets further ahead of what is contended than the depth allows.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph

ENDLESS = sys.maxsize
"""So many iterations have no end."""


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
    player = Player(graph, iterations)
    while player.step():
        pass
    return Playout(graph, iterations, player.ready, player.end, player.bound_by)


class _Wish(IntEnum):
    SUBMIT = 0
    HOLD = 1
    LOCK = 2


_HELD = -1
"""When a resource is free whose holder still stands in line for the lock: not known yet."""

_LOCK = 0
"""The lock's number among the resources."""


class Player:
    """A run, played step by step.

    Args:
        graph: What to play; where nothing in it is contended, a run must have an end.
        iterations: How many there are; may be ``ENDLESS``.

    Attributes:
        ready: Turn to ticks: its start, once it has an end.
        end: Turn to ticks; -1 where it is not known yet.
        bound_by: As in ``Playout``.
    """

    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.graph, self.iterations = graph, iterations
        self.size = len(graph.nodes)
        self.limit = self.size * (iterations + graph.depth - 1)
        self.ready: list[int] = []
        self.end: list[int] = []
        self.bound_by: list[int] = []
        self._pending: list[int] = []
        self._waits = _Waits(graph, iterations)
        self._out = _outgoing(graph)
        self._stage = [node.stage for node in graph.nodes]
        self._time = [node.time for node in graph.nodes]
        self._lock = [node.lock for node in graph.nodes]
        # Of contention:
        number = {LOCK: _LOCK}
        self._needs = [
            tuple([number.setdefault(what, len(number)) for what in node.resources])
            for node in graph.nodes
        ]
        self._wish = [
            _Wish.HOLD if node.resources else _Wish.LOCK if node.lock else None
            for node in graph.nodes
        ]
        self._heap: list[tuple[int, int, _Wish]] = []
        self._free = [0] * len(number)
        self._holder = [-1] * len(number)
        self._parked: dict[int, list[tuple[int, int, _Wish]]] = {}
        self._tail = -1  # the last turn in the caller's stream
        self._behind: dict[int, int] = {}
        self._grow()
        self._settle([turn for turn in range(self.size) if not self._pending[turn]])

    def step(self) -> bool:
        """Grant the earliest wish, and compute all that follows; False where there was none."""
        if not self._heap:
            return False
        if settle := self._serve(*heapq.heappop(self._heap)):
            self._settle(settle)
        return True

    def retired(self, iteration: int) -> int:
        """Play on until an iteration's end is known; when it comes, in ticks."""
        retire = self.graph.retire
        turn = (iteration + self._stage[retire]) * self.size + retire
        while turn >= len(self.end) or self.end[turn] < 0:
            self.step()
        return self.end[turn]

    def _grow(self) -> int:
        """Make room for some more periods; the number of turns that there is room for now."""
        more = min(2 * self.graph.depth, (self.limit - len(self.end)) // self.size)
        for _ in range(more):
            self._pending += self._waits.in_next_period()
        self.ready += [0] * (more * self.size)
        self.end += [-1] * (more * self.size)
        self.bound_by += [-1] * (more * self.size)
        return len(self.end)

    # ------------------------------------------------------------- uncontended

    def _settle(self, stack: list[int]) -> None:
        """Compute all turns that follow from those on the stack, but for the contended ones."""
        size, total, turns = self.size, self.iterations, len(self.end)
        stage, time, wish, out = self._stage, self._time, self._wish, self._out
        ready, pending, end, bound_by = self.ready, self._pending, self.end, self.bound_by
        queue = self.graph.queue
        while stack:
            turn = stack.pop()
            k = turn % size
            iteration = turn // size - stage[k]
            exists = 0 <= iteration < total
            ended = end[turn]
            if ended < 0:
                ended = ready[turn]
                if exists:
                    if (wanted := wish[k]) is not None:
                        heapq.heappush(self._heap, (ended, turn, wanted))
                        continue
                    ended += time[k]
                end[turn] = ended
            for ahead, extra, distance in out[k]:
                other = turn + ahead
                if other >= turns:
                    if other >= self.limit:
                        continue
                    turns = self._grow()
                if distance is not None and not (exists and 0 <= iteration + distance < total):
                    continue
                if ended + extra > ready[other]:
                    ready[other] = ended + extra
                    bound_by[other] = turn
                pending[other] -= 1
                if not pending[other]:
                    stack.append(other)
            if queue:
                stack += self._queued(turn, k, exists)

    # --------------------------------------------------------------- contended

    def _serve(self, time: int, turn: int, wish: _Wish) -> list[int]:
        """Grant the earliest wish; the turns that can be computed now."""
        if wish is _Wish.SUBMIT:
            return self._submit(turn)
        k = turn % self.size
        needs = self._needs[k] if wish is _Wish.HOLD else (_LOCK,)
        free, begin = self._free, time
        for what in needs:
            if free[what] == _HELD:
                self._parked.setdefault(what, []).append((time, turn, wish))
                return []
            begin = max(begin, free[what])
        if begin > time:
            for what in needs:
                if free[what] == begin:
                    self.bound_by[turn] = self._holder[what]
        if wish is _Wish.HOLD and self._lock[k]:
            for what in needs:
                free[what] = _HELD
            heapq.heappush(self._heap, (begin, turn, _Wish.LOCK))
            return []
        self._begin(turn, k, begin)
        return [turn]

    def _begin(self, turn: int, k: int, begin: int) -> None:
        self.ready[turn] = begin
        self.end[turn] = begin + self._time[k]
        if self._lock[k]:
            self._free[_LOCK] = begin + self._lock[k]
            self._holder[_LOCK] = turn
        for what in self._needs[k]:
            self._free[what] = self.end[turn]
            self._holder[what] = turn
            for waiting in self._parked.pop(what, ()):
                heapq.heappush(self._heap, waiting)

    # ------------------------------------------------------ the caller's stream

    def _queued(self, turn: int, k: int, exists: bool) -> list[int]:
        """What a turn's end means for the caller's stream; the turns it lets go on."""
        device = self.graph.device_of.get(k, -1)
        if exists and device in self.graph.queue:
            heapq.heappush(self._heap, (self.end[turn], turn - k + device, _Wish.SUBMIT))
        behind = self._behind.pop(turn, -1)
        return self._follow(turn, behind) if behind >= 0 else []

    def _submit(self, turn: int) -> list[int]:
        ahead, self._tail = self._tail, turn
        if ahead >= 0 and self.end[ahead] < 0:
            self._behind[ahead] = turn
            return []
        return self._follow(ahead, turn)

    def _follow(self, ahead: int, turn: int) -> list[int]:
        if ahead >= 0 and self.end[ahead] > self.ready[turn]:
            self.ready[turn] = self.end[ahead]
            self.bound_by[turn] = ahead
        self._pending[turn] -= 1
        return [] if self._pending[turn] else [turn]


class _Waits:
    """How many ends each turn waits for, period by period.

    A period has the waits of the one before it, but for those that bind for the first time in it,
    or did for the last time in the one before.
    """

    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.period = 0
        self.counts = [0] * len(graph.nodes)
        self.first: dict[int, list[int]] = defaultdict(list)
        self.over: dict[int, list[int]] = defaultdict(list)
        nodes, fixed = graph.nodes, len(graph.arcs) - graph.optional
        for _, head, _, lag in graph.arcs[:fixed]:
            self.first[lag].append(head)
        for tail, head, _, lag in graph.arcs[fixed:]:
            stages = (nodes[head].stage, nodes[tail].stage + lag)
            if max(stages) < min(stages) + iterations:
                self.first[max(stages)].append(head)
                self.over[min(stages) + iterations].append(head)
        for node in graph.queue:  # the turn ahead of it in the queue
            self.first[nodes[node].stage].append(node)
            self.over[nodes[node].stage + iterations].append(node)

    def in_next_period(self) -> list[int]:
        """Node to the ends that its turn waits for; valid until the next call."""
        for head in self.first.get(self.period, ()):
            self.counts[head] += 1
        for head in self.over.get(self.period, ()):
            self.counts[head] -= 1
        self.period += 1
        return self.counts


_Out: TypeAlias = tuple[int, int, int | None]
"""An arc as its tail's turns see it: from the tail's turn to the head's; ticks on top of the tail's
own time; for arcs that bind only where both iterations exist, from the tail's to the head's."""


def _outgoing(graph: TimedGraph) -> list[list[_Out]]:
    out: list[list[_Out]] = [[] for _ in graph.nodes]
    stage, time = [node.stage for node in graph.nodes], [node.time for node in graph.nodes]
    size, fixed = len(graph.nodes), len(graph.arcs) - graph.optional
    for tail, head, taken, lag in graph.arcs[:fixed]:
        out[tail].append((lag * size + head - tail, taken - time[tail], None))
    for tail, head, taken, lag in graph.arcs[fixed:]:
        distance = lag - stage[head] + stage[tail]
        out[tail].append((lag * size + head - tail, taken - time[tail], distance))
    return out
