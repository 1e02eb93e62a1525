"""Where walks begin: stages cut evenly, a period filled as it comes.

1. *Stages*: an iteration is cut into parts that take about as long as each other, as many as there
   may be iterations in flight. So a period has several parts to work on that do not wait for each
   other. Tasks that could go to several parts go to the first of them, or to the last.
2. *Order*: of the tasks that wait for nothing within the period any more, the one with the longest
   way to go behind it ("list scheduling"); `Rule` says which of them are looked at.

Which of these ways is the best is a matter of the loop: walks from one of them end at twice the
distance from the bound that walks from another do, and at half of it in the next loop.

Sources: stages first, resources after is "decomposed software pipelining" (J. Wang, C. Eisenbeis,
M. Jourdan, B. Su, International Journal of Parallel Programming 22, 1994); the rules are those of
B. Giffler and G. L. Thompson, "Algorithms for solving production-scheduling problems" (Operations
Research 8, 1960).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum

from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.loop_graph import LoopGraph


class Rule(Enum):
    """Which tasks may be next in the order, of all that are ready within the period."""

    NON_DELAY = "those that can start soonest: nothing stands idle that has work"
    ACTIVE = "those that can start before any of them could have ended"
    ANY = "all of them"


def beginnings(graph: LoopGraph, depth: int, threads: int) -> Iterator[Layout]:
    """The plans to begin with, each of another kind; none where so few in flight admit none."""
    known: list[Layout] = []
    for rule in Rule:
        for late in (False, True):
            layout = beginning(graph, depth, threads, rule, late=late)
            if layout is not None and layout not in known:
                known.append(layout)
                yield layout


def beginning(
    graph: LoopGraph,
    depth: int,
    lanes: Sequence[int] | int,
    rule: Rule = Rule.NON_DELAY,
    *,
    late: bool = False,
) -> Layout | None:
    """A plan to begin with; None where so few iterations in flight admit none.

    Args:
        graph: The loop.
        depth: Iterations in flight.
        lanes: Task to its thread, or the number of threads, each for who comes first.
        rule: Which tasks may be next in the order.
        late: Whether tasks go to the last stage that they could go to, not to the first.
    """
    for parts in range(depth, 0, -1):
        stages = _stages(graph, depth, parts, late=late)
        filled = None if stages is None else _Filling(graph, stages, lanes).fill(rule)
        if filled is not None:
            return filled
    return None


def _stages(graph: LoopGraph, depth: int, parts: int, *, late: bool) -> list[int] | None:
    """Task to its stage, the last being depth - 1; None where dependences have it otherwise."""
    time = [max(graph.host_us[v], graph.device_us[v]) for v in range(graph.size)]
    way = _longest_ways(graph, time, late=late)
    ends = [w + t for w, t in zip(way, time, strict=True)]
    long = max(ends) or 1.0
    middle = [(w + e) / 2 for w, e in zip(way, ends, strict=True)]
    if late:
        middle = [long - m for m in middle]
    stages = [min(parts - 1, int(m / long * parts)) for m in middle]
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


def _longest_ways(graph: LoopGraph, time: Sequence[float], *, late: bool) -> list[float]:
    """Task to the longest way from the start of the iteration to it, or from it to the end."""
    place = {v: number for number, v in enumerate(graph.serial)}
    within = [(c, p) for c, p, distance in graph.deps if distance == 0]
    if late:
        pairs = sorted(((p, c) for c, p in within), key=lambda pair: -place[pair[0]])
    else:
        pairs = sorted(within, key=lambda pair: place[pair[0]])
    way = [0.0] * graph.size
    for here, before in pairs:
        way[here] = max(way[here], way[before] + time[before])
    return way


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

    def fill(self, rule: Rule) -> Layout | None:
        """Fill it; None where dependences within the period form a cycle."""
        n, waits = self.graph.size, list(self.waits)
        behind = self._behind()
        ready = [v for v in range(n) if not waits[v]]
        order: list[int] = []
        lanes = [0] * n
        while ready:
            start = {v: self._start(v) for v in ready}
            latest = self._latest(start, rule)
            soon = [v for v in ready if start[v] <= latest]
            task = min(soon, key=lambda v: (-behind[v], start[v], v))
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

    def _latest(self, start: dict[int, float], rule: Rule) -> float:
        """The next task starts no later than this; ``start`` says when each could."""
        if rule is Rule.ANY:
            return math.inf
        if rule is Rule.NON_DELAY:
            return min(start.values())
        host_us, device_us = self.graph.host_us, self.graph.device_us
        return min(us + max(host_us[v], device_us[v]) for v, us in start.items())

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
