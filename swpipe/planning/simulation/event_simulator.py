"""Discrete-event simulation of a timed graph, which computes each node's start and end in a run.

    uncontended   ready ──────────────────────────────────────────> starts at once
    contended     ready ──> heap ──> all that it needs is free ───> starts
    on a queue    launched ──> heap ──> last in its queues ──> the one ahead ends ──> ready

A node's execution in one period is ready once all its predecessors have ended. If it is not
contended, its end is computed at once, however far ahead in time. Contended executions wait in a
heap until nothing else can be computed. Then the earliest of them is granted: every execution that
is not computed yet comes after one in the heap, and so cannot be ready earlier. So only contended
executions are processed in order of time. One that needs something that is not free asks again when
it is; of several that ask at the same time, the one that asked first goes first.

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
from itertools import count
from typing import TypeAlias

from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph

UNBOUNDED = sys.maxsize
"""The number of iterations of a run that has no last iteration."""


_Request: TypeAlias = tuple[int, int, int, bool]
"""A time, the time of the first request, the execution, and whether it asks to enter its queues."""

_OutArc: TypeAlias = tuple[int, int, int | None]
"""An arc relative to its tail.

The offset to the head's execution; the ticks in addition to the tail's own time; and, for arcs that
apply only if both iterations exist, the offset between the iterations.
"""

# Plain tuples, because the inner loop unpacks them: Python unpacks a named tuple more slowly.
_Step: TypeAlias = tuple[int, int, tuple[int, ...], bool, list[_OutArc]]
"""A node's stage, time, times of sampled iterations, whether it is contended, and arcs."""


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
        # Contended executions: requests by time, the time from which each resource is free, the
        # last execution in each queue, and the executions behind one in a queue.
        self._heap: list[_Request] = []
        self._free: dict[str, int] = defaultdict(int)
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
        time, asked, execution, is_launch = heapq.heappop(self._heap)
        ready = self._launch(execution) if is_launch else self._grant(time, asked, execution)
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
            stage, time, each, contended, arcs = steps[k]
            iteration = execution // size - stage
            exists = 0 <= iteration < total
            ended = end[execution]
            if ended < 0:
                ended = start[execution]
                if exists:
                    # Contended: wait in the heap. ``_grant`` sets the end and puts the execution
                    # back on the stack.
                    if contended:
                        heapq.heappush(self._heap, (ended, ended, execution, False))
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

    def _grant(self, now: int, asked: int, execution: int) -> list[int]:
        """Start an execution if all that it needs is free; return the executions to compute."""
        period, k = divmod(execution, self.size)
        node = self.graph.nodes[k]
        free = max(self._free[name] for name in (*node.resources, *[LOCK] * bool(node.lock)))
        if free > now:
            heapq.heappush(self._heap, (free, asked, execution, False))
            return []
        time = node.time
        lock = node.lock
        if node.each and time:
            taken = node.each[(period - node.stage) % len(node.each)]
            lock = lock * taken // time  # the same part of each run
            time = taken
        self.start[execution] = now
        self.end[execution] = now + time
        for name in node.resources:
            self._free[name] = now + time
        if lock:
            self._free[LOCK] = now + lock
        return [execution]

    # ------------------------------------------------------------------ queues

    def _after_launch(self, execution: int, k: int, exists: bool) -> list[int]:
        """Queue the device work of a launch; return what waited in a queue for this execution."""
        device = self.graph.device_of.get(k, -1)
        if exists and device in self.graph.queues:
            launched = execution - k + device
            now = self.end[execution]
            heapq.heappush(self._heap, (now, now, launched, True))
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
            bool(node.resources or node.lock),
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
