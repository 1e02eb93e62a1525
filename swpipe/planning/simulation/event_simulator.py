"""Discrete-event simulation of a timed graph, which computes each node's start and end in a run.

    uncontended   ready ──────────────────────────────────────────> starts at once
    contended     ready ──> heap ──> resources ──> lock ──────────> starts
    on a queue    launched ──> heap ──> last in its queues ──> the one ahead ends ──> ready

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
from collections.abc import Iterator
from enum import IntEnum
from itertools import count
from typing import TypeAlias

from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph

UNBOUNDED = sys.maxsize
"""The number of iterations of a run that has no last iteration."""


class _Kind(IntEnum):
    """The kind of a request: to enter queues, to take resources, or to take the lock."""

    LAUNCH = 0
    HOLD = 1
    LOCK = 2


_Request: TypeAlias = tuple[int, int, _Kind]
"""The time of a request, its execution, and its kind."""


_OutArc: TypeAlias = tuple[int, int, int | None]
"""An arc relative to its tail.

The offset to the head's execution; the ticks in addition to the tail's own time; and, for arcs that
apply only if both iterations exist, the offset between the iterations.
"""

# Plain tuples, because the inner loop unpacks them: Python unpacks a named tuple more slowly.
_Step: TypeAlias = tuple[int, int, tuple[int, ...], _Kind | None, list[_OutArc]]
"""A node's stage, time, times of sampled iterations, kind of request, and arcs."""


class _Resource:
    """A contended resource, or the interpreter lock.

    Attributes:
        free: The time from which it is free; None while its holder waits for the lock, because the
            holder's end is not known then.
        waiting: The requests that were made meanwhile.
    """

    __slots__ = ("free", "waiting")

    def __init__(self) -> None:
        self.free: int | None = 0
        self.waiting: list[_Request] = []


class EventSimulator:
    """A run of a timed graph that is simulated step by step.

    An execution is a node's turn in one period; its number is ``period * size + node``.

    Args:
        graph: The graph to simulate; a graph without contention needs a bounded run.
        iterations: The number of iterations; may be ``UNBOUNDED``.

    Attributes:
        size: The number of nodes.
        start: The start of each execution, in ticks since the first period began. While its end is
            unknown, the time at which its predecessors so far have ended.
        end: The end of each execution, in ticks; -1 while unknown.
    """

    def __init__(self, graph: TimedGraph, iterations: int) -> None:
        self.graph = graph
        self.iterations = iterations
        self.size = len(graph.nodes)
        self.start: list[int] = []
        self.end: list[int] = []
        self._reach = graph.reach
        self._limit = self.size * (iterations + graph.depth - 1)
        self._steps = _steps(graph)
        # The predecessors of each execution that have not ended.
        self._pending: list[int] = []
        self._predecessors = _predecessors(graph, iterations)
        # Contended executions: requests by time, the lock, the resources that each node needs, the
        # last execution in each queue, and the executions behind one in a queue.
        self._heap: list[_Request] = []
        resources: dict[str, _Resource] = defaultdict(_Resource)
        self._lock = resources[LOCK]
        self._needs = [tuple(map(resources.__getitem__, node.resources)) for node in graph.nodes]
        self._last: dict[int, int] = {}
        self._behind: dict[int, list[int]] = {}
        self._grow()
        # Executions without predecessors: in the first period and, with several workers, in the
        # next ones.
        self._propagate([execution for execution, n in enumerate(self._pending) if not n])

    def step(self) -> bool:
        """Grant the earliest request, and compute what follows; return False if there is none."""
        if not self._heap:
            return False
        if ready := self._grant(heapq.heappop(self._heap)):
            self._propagate(ready)
        return True

    def execution(self, node: int, iteration: int) -> int:
        """Return the number of a node's execution for an iteration."""
        return (iteration + self.graph.nodes[node].stage) * self.size + node

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
        more = min(self._reach, (self._limit - len(self.end)) // self.size)
        for _ in range(more):
            self._pending += next(self._predecessors)
        self.start += [0] * (more * self.size)
        self.end += [-1] * (more * self.size)
        return len(self.end)

    # ------------------------------------------------------------- uncontended

    def _propagate(self, stack: list[int]) -> None:
        """Compute all executions that follow from those on the stack, except contended ones."""
        # Local names, because this loop takes most of the time of a simulation.
        size = self.size
        total = self.iterations
        known = len(self.end)
        steps = self._steps
        start = self.start
        pending = self._pending
        end = self.end
        queues = self.graph.queues
        while stack:
            execution = stack.pop()
            k = execution % size
            stage, time, each, request, arcs = steps[k]
            iteration = execution // size - stage
            exists = 0 <= iteration < total
            ended = end[execution]
            if ended < 0:
                ended = start[execution]
                if exists:
                    # Contended: wait in the heap. ``_grant`` sets the end and puts the execution
                    # back on the stack.
                    if request is not None:
                        heapq.heappush(self._heap, (ended, execution, request))
                        continue
                    ended += each[iteration % len(each)] if each else time
                end[execution] = ended
            for ahead, extra, distance in arcs:
                other = execution + ahead
                if other >= known:
                    if other >= self._limit:
                        continue
                    known = self._grow()
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

    def _grant(self, request: _Request) -> list[int]:
        """Grant a request, and return the executions that can be computed now."""
        begin, execution, kind = request
        if kind is _Kind.LAUNCH:
            return self._launch(execution)
        k = execution % self.size
        needs = (self._lock,) if kind is _Kind.LOCK else self._needs[k]
        for resource in needs:
            # Ask again when the holder has started, and its end is known.
            if resource.free is None:
                resource.waiting.append(request)
                return []
            begin = max(begin, resource.free)
        # Resources first, then the lock. The resources stay held meanwhile, as in Python code that
        # waits for the lock inside a ``with`` block.
        if kind is _Kind.HOLD and self.graph.nodes[k].lock:
            for resource in needs:
                resource.free = None
            heapq.heappush(self._heap, (begin, execution, _Kind.LOCK))
            return []
        self._start(execution, k, begin)
        return [execution]

    def _start(self, execution: int, k: int, begin: int) -> None:
        node = self.graph.nodes[k]
        time = node.time
        lock = node.lock
        if node.each and time:
            iteration = execution // self.size - node.stage
            taken = node.each[iteration % len(node.each)]
            lock = lock * taken // time  # the same part of each run
            time = taken
        self.start[execution] = begin
        self.end[execution] = begin + time
        if lock:
            self._lock.free = begin + lock
        for resource in self._needs[k]:
            resource.free = begin + time
            for request in resource.waiting:
                heapq.heappush(self._heap, request)
            resource.waiting.clear()

    # ------------------------------------------------------------------ queues

    def _after_launch(self, execution: int, k: int, exists: bool) -> list[int]:
        """Queue the device work of a launch; return what waited in a queue for this execution."""
        device = self.graph.device_of.get(k, -1)
        if exists and device in self.graph.queues:
            launched = execution - k + device
            heapq.heappush(self._heap, (self.end[execution], launched, _Kind.LAUNCH))
        behind = self._behind.pop(execution, ())
        return [ready for other in behind for ready in self._release(execution, other)]

    def _launch(self, execution: int) -> list[int]:
        ready: list[int] = []
        for queue in self.graph.queues[execution % self.size]:
            # Work goes behind the last one in each of its queues; the end of that one may be known
            # already.
            ahead = self._last.get(queue, -1)
            self._last[queue] = execution
            if ahead >= 0 and self.end[ahead] < 0:
                self._behind.setdefault(ahead, []).append(execution)
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


def _steps(graph: TimedGraph) -> list[_Step]:
    nodes = graph.nodes
    out: list[list[_OutArc]] = [[] for _ in nodes]
    for arcs, is_optional in ((graph.fixed, False), (graph.optional, True)):
        for tail, head, time, lag in arcs:
            ahead = lag * len(nodes) + head - tail
            distance = lag - nodes[head].stage + nodes[tail].stage if is_optional else None
            out[tail].append((ahead, time - nodes[tail].time, distance))
    return [
        (
            node.stage,
            node.time,
            node.each,
            _Kind.HOLD if node.resources else _Kind.LOCK if node.lock else None,
            arcs,
        )
        for node, arcs in zip(nodes, out, strict=True)
    ]


def _predecessors(graph: TimedGraph, iterations: int) -> Iterator[list[int]]:
    """Yield the number of predecessors of each node's execution, period by period.

    The numbers change from one period to the next only by waits that begin or cease to apply. Each
    list is valid until the next one is yielded.
    """
    nodes = graph.nodes
    # A wait of lag n applies from period n on.
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, head, _, lag in graph.fixed:
        changes[lag].append((head, 1))
    # An optional wait applies while both of its iterations exist; in each of its queues, a node
    # waits for the one ahead of it while its own iteration exists.
    stages = [
        (head, nodes[head].stage, nodes[tail].stage + lag) for tail, head, _, lag in graph.optional
    ]
    for node, queues in graph.queues.items():
        stages += [(node, nodes[node].stage, nodes[node].stage)] * len(queues)
    for node, *both in stages:
        if max(both) < min(both) + iterations:
            changes[max(both)].append((node, 1))
            changes[min(both) + iterations].append((node, -1))
    counts = [0] * len(nodes)
    for period in count():
        for node, change in changes.get(period, ()):
            counts[node] += change
        yield counts
