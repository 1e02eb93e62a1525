"""Discrete-event simulation of a timed graph, which computes each node's start and end in a run.

    ready ──> starts at once                      if it is not contended
          ──> waits for its turn in a queue, in the order of launch
          ──> waits for its resources, then for the interpreter lock, in the order of ready times

A node's execution in one period is ready once all its predecessors have ended. If it is not
contended, its end is computed at once, however far ahead in time. Contended executions wait in a
heap until nothing else can be computed. Then the earliest of them is granted: every execution that
is not computed yet comes after one in the heap, and so cannot be ready earlier. So only contended
executions are processed in order of time.

Executions for iterations that do not exist, before the first and after the last, take no time;
threads still pass them and do their host waits, as in the engine.

If a node has the times of sampled iterations, iteration i takes the time of sample i modulo their
number, in all nodes alike: tasks that were slow in the same iteration are slow together.

A run may have no last iteration: it is simulated as far as requested. The graph must then limit how
far the host gets ahead of the device (``TimedGraph.limited``).
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from enum import IntEnum
from typing import TypeAlias

from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph

UNBOUNDED = sys.maxsize
"""The number of iterations of a run that has no last iteration."""


class _Request(IntEnum):
    LAUNCH = 0
    HOLD = 1
    LOCK = 2


_HELD = -1
"""The free time of a resource whose holder waits for the lock: not known yet."""

_LOCK = 0
"""The number of the interpreter lock among the resources."""


class EventSimulator:
    """A run of a timed graph that is simulated step by step.

    An execution is a node's turn in one period; its number is ``period * nodes + node``.

    Args:
        graph: The graph to simulate; a graph without contention needs a bounded run.
        iterations: The number of iterations; may be ``UNBOUNDED``.

    Attributes:
        start: The start of each execution, in ticks since the first period began. While its end is
            unknown, the time at which its predecessors so far have ended.
        end: The end of each execution, in ticks; -1 while unknown.
    """

    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.graph = graph
        self.iterations = iterations
        self.size = len(graph.nodes)
        self._reach = graph.reach
        self.limit = self.size * (iterations + graph.depth - 1)
        self.start: list[int] = []
        self.end: list[int] = []
        # ``_pending`` counts the predecessors of each execution that have not ended.
        self._pending: list[int] = []
        self._waits = _Waits(graph, iterations)
        self._out = _outgoing(graph)
        self._stage = [node.stage for node in graph.nodes]
        self._time = [node.time for node in graph.nodes]
        self._each = [node.each for node in graph.nodes]
        self._sampled = graph.sampled
        self._lock = [node.lock for node in graph.nodes]
        # The rest is for contended executions: ``_heap`` has requests by time; ``_free`` the time
        # at which each resource is free; ``_blocked`` the requests for a resource whose holder
        # waits for the lock; ``_next`` the executions behind one in a queue.
        number = {LOCK: _LOCK}
        self._needs = [
            tuple([number.setdefault(what, len(number)) for what in node.resources])
            for node in graph.nodes
        ]
        self._request = [
            _Request.HOLD if node.resources else _Request.LOCK if node.lock else None
            for node in graph.nodes
        ]
        self._heap: list[tuple[int, int, _Request]] = []
        self._free = [0] * len(number)
        self._blocked: dict[int, list[tuple[int, int, _Request]]] = {}
        # The last execution in each queue.
        self._last: dict[int, int] = {}
        self._next: dict[int, list[int]] = {}
        self._grow()
        self._propagate(
            # Executions without predecessors: in the first period and, with several workers, in the
            # next ones.
            [execution for execution, waits in enumerate(self._pending) if not waits]
        )

    def step(self) -> bool:
        """Grant the earliest request, and compute what follows; return False if there is none."""
        if not self._heap:
            return False
        if ready := self._grant(*heapq.heappop(self._heap)):
            self._propagate(ready)
        return True

    def execution(self, node: int, iteration: int) -> int:
        """Return the number of a node's execution for an iteration."""
        return (iteration + self._stage[node]) * self.size + node

    def retired(self, iteration: int) -> int:
        """Simulate until an iteration is retired, and return the time in ticks."""
        execution = self.execution(self.graph.retire, iteration)
        while execution >= len(self.end) or self.end[execution] < 0:
            self.step()
        return self.end[execution]

    def _grow(self) -> int:
        """Add some periods, and return the new number of executions."""
        # As many periods as one execution can affect directly, so that one growth is enough for any
        # arc.
        more = min(self._reach, (self.limit - len(self.end)) // self.size)
        for _ in range(more):
            self._pending += self._waits.in_next_period()
        self.start += [0] * (more * self.size)
        self.end += [-1] * (more * self.size)
        return len(self.end)

    # ------------------------------------------------------------- uncontended

    def _propagate(self, stack: list[int]) -> None:
        """Compute all executions that follow from those on the stack, except contended ones."""
        # Local names, because this loop takes most of the time of a simulation.
        size = self.size
        total = self.iterations
        count = len(self.end)
        stage = self._stage
        time = self._time
        request = self._request
        out = self._out
        start = self.start
        pending = self._pending
        end = self.end
        queues = self.graph.queues
        each = self._each
        sampled = self._sampled
        while stack:
            execution = stack.pop()
            k = execution % size
            iteration = execution // size - stage[k]
            exists = 0 <= iteration < total
            ended = end[execution]
            if ended < 0:
                ended = start[execution]
                if exists:
                    # Contended: wait in the heap. ``_grant`` sets the end and puts the execution
                    # back on the stack.
                    if (needed := request[k]) is not None:
                        heapq.heappush(self._heap, (ended, execution, needed))
                        continue
                    ended += each[k][iteration % sampled] if each[k] else time[k]
                end[execution] = ended
            for ahead, extra, distance in out[k]:
                other = execution + ahead
                if other >= count:
                    if other >= self.limit:
                        continue
                    count = self._grow()
                # Arcs between iterations apply only if both iterations exist.
                if distance is not None and not (exists and 0 <= iteration + distance < total):
                    continue
                if ended + extra > start[other]:
                    start[other] = ended + extra
                pending[other] -= 1
                if not pending[other]:
                    stack.append(other)
            if queues:
                stack += self._after_launch(execution, k, exists)

    # --------------------------------------------------------------- contended

    def _grant(self, time: int, execution: int, request: _Request) -> list[int]:
        """Grant a request, and return the executions that can be computed now."""
        if request is _Request.LAUNCH:
            return self._launch(execution)
        k = execution % self.size
        needs = self._needs[k] if request is _Request.HOLD else (_LOCK,)
        free = self._free
        begin = time
        for what in needs:
            # The holder's end is not known, because it waits for the lock: ask again when it has
            # started.
            if free[what] == _HELD:
                self._blocked.setdefault(what, []).append((time, execution, request))
                return []
            begin = max(begin, free[what])
        # Resources first, then the lock. The resources stay held meanwhile, as in Python code that
        # waits for the lock inside a ``with`` block.
        if request is _Request.HOLD and self._lock[k]:
            for what in needs:
                free[what] = _HELD
            heapq.heappush(self._heap, (begin, execution, _Request.LOCK))
            return []
        self._start(execution, k, begin)
        return [execution]

    def _start(self, execution: int, k: int, begin: int) -> None:
        time = self._time[k]
        lock = self._lock[k]
        if self._each[k] and time:
            iteration = execution // self.size - self._stage[k]
            taken = self._each[k][iteration % self._sampled]
            lock = lock * taken // time  # the same part of each run
            time = taken
        self.start[execution] = begin
        self.end[execution] = begin + time
        if lock:
            self._free[_LOCK] = begin + lock
        for what in self._needs[k]:
            self._free[what] = self.end[execution]
            for waiting in self._blocked.pop(what, ()):
                heapq.heappush(self._heap, waiting)

    # ------------------------------------------------------------------ queues

    def _after_launch(self, execution: int, k: int, exists: bool) -> list[int]:
        """Queue the device work of a launch; return what waited in a queue for this execution."""
        device = self.graph.device_of.get(k, -1)
        if exists and device in self.graph.queues:
            heapq.heappush(
                self._heap, (self.end[execution], execution - k + device, _Request.LAUNCH)
            )
        behind = self._next.pop(execution, ())
        return [ready for other in behind for ready in self._release(execution, other)]

    def _launch(self, execution: int) -> list[int]:
        ready: list[int] = []
        for queue in self.graph.queues[execution % self.size]:
            # Work goes behind the last one in each of its queues; the end of that one may be known
            # already.
            ahead, self._last[queue] = self._last.get(queue, -1), execution
            if ahead >= 0 and self.end[ahead] < 0:
                self._next.setdefault(ahead, []).append(execution)
            else:
                ready += self._release(ahead, execution)
        return ready

    def _release(self, ahead: int, execution: int) -> list[int]:
        if ahead >= 0:
            self.start[execution] = max(self.start[execution], self.end[ahead])
        self._pending[execution] -= 1
        return [] if self._pending[execution] else [execution]


def simulate_run(graph: TimedGraph, iterations: int) -> EventSimulator:
    """Simulate a number of iterations to their end, prologue and epilogue included."""
    run = EventSimulator(graph, iterations)
    while run.step():
        pass
    return run


class _Waits:
    """The number of predecessors of each execution, period by period.

    The numbers change from one period to the next only by waits that begin or cease to apply.
    """

    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.period = 0
        self.counts = [0] * len(graph.nodes)
        self.first: dict[int, list[int]] = defaultdict(list)
        self.over: dict[int, list[int]] = defaultdict(list)
        nodes = graph.nodes
        # A wait of lag n applies from period n on. An optional wait applies while both of its
        # iterations exist, so it has a first and a last period.
        fixed = len(graph.arcs) - graph.optional
        for _, head, _, lag in graph.arcs[:fixed]:
            self.first[lag].append(head)
        for tail, head, _, lag in graph.arcs[fixed:]:
            stages = (nodes[head].stage, nodes[tail].stage + lag)
            if max(stages) < min(stages) + iterations:
                self.first[max(stages)].append(head)
                self.over[min(stages) + iterations].append(head)
        # In each of its queues, a node waits for the one ahead of it.
        for node, queues in graph.queues.items():
            self.first[nodes[node].stage] += [node] * len(queues)
            self.over[nodes[node].stage + iterations] += [node] * len(queues)

    def in_next_period(self) -> list[int]:
        """Return each node's predecessor count in the next period.

        It is valid until the next call.
        """
        for head in self.first.get(self.period, ()):
            self.counts[head] += 1
        for head in self.over.get(self.period, ()):
            self.counts[head] -= 1
        self.period += 1
        return self.counts


_OutArc: TypeAlias = tuple[int, int, int | None]
"""An arc relative to its tail.

The offset to the head's execution; the ticks in addition to the tail's own time; and, for arcs that
apply only if both iterations exist, the offset between the iterations.
"""


def _outgoing(graph: TimedGraph) -> list[list[_OutArc]]:
    out: list[list[_OutArc]] = [[] for _ in graph.nodes]
    stage = [node.stage for node in graph.nodes]
    time = [node.time for node in graph.nodes]
    size = len(graph.nodes)
    fixed = len(graph.arcs) - graph.optional
    for tail, head, taken, lag in graph.arcs[:fixed]:
        out[tail].append((lag * size + head - tail, taken - time[tail], None))
    for tail, head, taken, lag in graph.arcs[fixed:]:
        distance = lag - stage[head] + stage[tail]
        out[tail].append((lag * size + head - tail, taken - time[tail], distance))
    return out
