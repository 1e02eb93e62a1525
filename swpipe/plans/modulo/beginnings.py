"""Where walks begin: stages cut evenly, a period filled as it comes.

1. *Stages*: an iteration is cut into parts that take about as long as each other, as many as there
   may be iterations in flight. So a period has several parts to work on that do not wait for each
   other.
2. *Order*: of the tasks that wait for nothing within the period any more, the one that can start
   soonest starts; of several the one with the longest way to go behind it ("list scheduling").

Source: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994).
"""

from __future__ import annotations

from collections.abc import Sequence

from swpipe.plans.modulo.layout import Layout
from swpipe.plans.modulo.loop_graph import LoopGraph


def beginning(graph: LoopGraph, depth: int, lanes: Sequence[int] | int) -> Layout | None:
    """A plan to begin with; None where so few iterations in flight admit none.

    Args:
        graph: The loop.
        depth: Iterations in flight.
        lanes: Task to its thread, or the number of threads, each for who comes first.
    """
    for parts in range(depth, 0, -1):
        stages = _stages(graph, depth, parts)
        filled = None if stages is None else _Filling(graph, stages, lanes).fill()
        if filled is not None:
            return filled
    return None


def _stages(graph: LoopGraph, depth: int, parts: int) -> list[int] | None:
    """Task to its stage, the last being depth - 1; None where dependences have it otherwise."""
    time = [max(graph.host_us[v], graph.device_us[v]) for v in range(graph.size)]
    start = [0.0] * graph.size
    for v in graph.serial:
        for consumer, producer, distance in graph.deps:
            if consumer == v and distance == 0:
                start[v] = max(start[v], start[producer] + time[producer])
    long = max(s + t for s, t in zip(start, time, strict=True)) or 1.0
    stages = [
        min(parts - 1, int((s + t / 2) / long * parts)) for s, t in zip(start, time, strict=True)
    ]
    for _ in range(2 * graph.size + 4):
        before = list(stages)
        for consumer, producer, distance in graph.deps:
            stages[consumer] = max(stages[consumer], stages[producer] - distance)
        for v in graph.last:
            stages[v] = max(stages)
        if stages == before:
            shift = depth - 1 - max(stages)
            return [stage + shift for stage in stages] if min(stages) + shift >= 0 else None
    return None


class _Filling:
    """A period that is being filled.

    Args:
        graph: The loop.
        stages: Task to its stage.
        lanes: Task to its thread, or the number of threads to choose from.
    """

    def __init__(self, graph: LoopGraph, stages: Sequence[int], lanes: Sequence[int] | int) -> None:
        n = graph.size
        self.graph, self.stages = graph, stages
        if isinstance(lanes, int):
            anywhere = tuple(range(lanes))
            self.allowed = [(0,) if v in graph.frozen else anywhere for v in range(n)]
        else:
            self.allowed = [(lane,) for lane in lanes]
        self.heads: list[list[int]] = [[] for _ in range(n)]
        self.waits = [0] * n
        for consumer, producer, distance in graph.deps:
            if stages[consumer] - stages[producer] + distance == 0:
                self.heads[producer].append(consumer)
                self.waits[consumer] += 1
        self.thread_free = [0.0] * (1 + max(max(lanes) for lanes in self.allowed))
        self.free = [0.0] * len(graph.resources)
        self.since = [0.0] * (2 * n)

    def fill(self) -> Layout | None:
        """Fill it; None where dependences within the period form a cycle."""
        n, waits = self.graph.size, list(self.waits)
        behind = self._behind()
        ready = [v for v in range(n) if not waits[v]]
        order: list[int] = []
        lanes = [0] * n
        while ready:
            task = min(ready, key=lambda v: (self._start(v), -behind[v], v))
            ready.remove(task)
            order.append(task)
            lanes[task] = self._put(task)
            for consumer in self.heads[task]:
                waits[consumer] -= 1
                if not waits[consumer]:
                    ready.append(consumer)
        if len(order) < n:
            return None
        return Layout(tuple(lanes), tuple(self.stages), tuple(order), max(self.stages) + 1)

    def _behind(self) -> list[float]:
        """Task to the longest way from its start to the end of the period."""
        graph, waits = self.graph, list(self.waits)
        sorted_: list[int] = [v for v in range(graph.size) if not waits[v]]
        for task in sorted_:  # grows meanwhile
            for consumer in self.heads[task]:
                waits[consumer] -= 1
                if not waits[consumer]:
                    sorted_.append(consumer)
        behind = [0.0] * graph.size
        for task in reversed(sorted_):
            longest = max((behind[consumer] for consumer in self.heads[task]), default=0.0)
            behind[task] = longest + max(graph.host_us[task], graph.device_us[task])
        return behind

    def _host(self, task: int) -> float:
        holds = self.graph.holds[task]
        free = min(self.thread_free[lane] for lane in self.allowed[task])
        return max([free, self.since[task], *(self.free[hold.what] for hold in holds)])

    def _device(self, task: int, ended: float) -> float:
        operation = self.graph.size + task
        holds = self.graph.holds[operation]
        return max([ended, self.since[operation], *(self.free[hold.what] for hold in holds)])

    def _start(self, task: int) -> float:
        """When it could start without waiting, on its thread or in its stream's queue."""
        host = self._host(task)
        if not self.graph.streams:
            return host
        return self._device(task, host + self.graph.host_us[task]) - self.graph.host_us[task]

    def _put(self, task: int) -> int:
        """Start it; the thread it starts on: of those free by then the one that was last busy."""
        graph, n = self.graph, self.graph.size
        host = self._host(task)
        lane = max(
            (lane for lane in self.allowed[task] if self.thread_free[lane] <= host),
            key=lambda lane: (self.thread_free[lane], -lane),
        )
        ended = self.thread_free[lane] = host + graph.host_us[task]
        device = self._device(task, ended)
        for start, operation in ((host, task), (device, n + task)):
            for hold in graph.holds[operation]:
                self.free[hold.what] = start + hold.time_us
        for consumer in self.heads[task]:
            self.since[consumer] = max(self.since[consumer], ended)
            done = device + graph.device_us[task]
            self.since[n + consumer] = max(self.since[n + consumer], done)
        return lane
