"""Host work shared out to threads as evenly as can be, and how even that is at best.

The longest task goes to the thread with the least work; then tasks are moved and swapped while that
relieves the busiest thread. That is hardly ever far from the best; what the best is, is found by
trying all ways that might still be better ("branch and bound"), where there are not too many.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.plans.modulo.loop_graph import LoopGraph

EPS_US = 1e-6

_NOISE = 0.3
"""By up to this part tasks count as longer or shorter than they are, to be shared out anew."""

_TRIES = 12
"""So many ways to share out are tried before all are."""

_MOST_NODES = 2_500
"""Tasks placed before the search for a better way is given up."""


def least_load(graph: LoopGraph, threads: int) -> float:
    """The host work of the busiest thread where it is shared out best, or a lower bound of it."""
    free = [v for v in range(graph.size) if v not in graph.frozen]
    pinned = sum(graph.host_us[v] for v in graph.frozen)
    even = max(sum(graph.host_us) / threads, *graph.host_us, pinned)
    rng = random.Random(threads)
    found = min(
        max(_loads(graph, shared_out(graph, threads, rng if k else None), threads))
        for k in range(_TRIES if graph.size <= _FEW else 1)
    )
    if found <= even + EPS_US or graph.size > _FEW:
        return even
    work = sorted((graph.host_us[v] for v in free), reverse=True)
    ways = _Ways(work, [pinned, *[0.0] * (threads - 1)], found, even)
    ways.place(0)
    return even if ways.nodes > _MOST_NODES else ways.least


_FEW = 24
"""In loops of more tasks than this, work is shared out evenly whatever the tasks are like."""


def _loads(graph: LoopGraph, lanes: Sequence[int], threads: int) -> list[float]:
    loads = [0.0] * threads
    for v, lane in enumerate(lanes):
        loads[lane] += graph.host_us[v]
    return loads


@dataclass(slots=True)
class _Ways:
    """All ways to place work on threads that might be better than the best so far.

    Attributes:
        work: What is to be placed, the longest first.
        loads: What the threads have already.
        least: The busiest thread's load in the best way so far.
        enough: No way is better than this.
        nodes: How often something was placed.
    """

    work: Sequence[float]
    loads: list[float]
    least: float
    enough: float
    nodes: int = 0

    def place(self, at: int) -> None:
        """Place the work from this one on in all ways."""
        if at == len(self.work):
            self.least = max(self.loads)
            return
        time, tried = self.work[at], set()
        for lane, load in sorted(enumerate(self.loads), key=lambda pair: pair[1]):
            full = load + time >= self.least - EPS_US
            if full or self.least <= self.enough + EPS_US or self.nodes > _MOST_NODES:
                return
            if load in tried:
                continue
            tried.add(load)
            self.nodes += 1
            self.loads[lane] = load + time
            if self._room(at + 1):
                self.place(at + 1)
            self.loads[lane] = load

    def _room(self, at: int) -> bool:
        """Whether what is left fits, less what no thread can take even the shortest of."""
        shortest = self.work[-1]
        room = [self.least - load for load in self.loads]
        return sum(r for r in room if r > shortest) >= sum(self.work[at:])


def shared_out(graph: LoopGraph, threads: int, rng: random.Random | None = None) -> list[int]:
    """Task to a thread, host work shared out evenly; with ``rng`` in one of many ways."""
    host, frozen = graph.host_us, graph.frozen
    free = [v for v in range(graph.size) if v not in frozen]
    load = [0.0] * threads
    load[0] = sum(host[v] for v in frozen)
    lanes = [0] * graph.size
    noise = {v: 0.0 if rng is None else _NOISE * (2 * rng.random() - 1) for v in free}
    for v in sorted(free, key=lambda v: (-host[v] * (1 + noise[v]), v)):
        lanes[v] = min(range(threads), key=lambda lane: (load[lane], lane))
        load[lanes[v]] += host[v]
    while moves := _relief(graph, lanes, load, free):
        for v, lane in moves:
            load[lanes[v]] -= host[v]
            load[lane] += host[v]
            lanes[v] = lane
    return lanes


def _relief(
    graph: LoopGraph, lanes: Sequence[int], load: Sequence[float], free: Sequence[int]
) -> list[tuple[int, int]]:
    """The move or swap that relieves the busiest thread most; none where none does."""
    host = graph.host_us
    busiest = max(range(len(load)), key=lambda lane: load[lane])
    least, moves = load[busiest] - EPS_US, []
    for v in free:
        if lanes[v] != busiest:
            continue
        for lane in range(len(load)):
            if lane != busiest:
                after = max(load[busiest] - host[v], load[lane] + host[v])
                if after < least:
                    least, moves = after, [(v, lane)]
        for w in free:
            if lanes[w] != busiest:
                less = host[v] - host[w]
                after = max(load[busiest] - less, load[lanes[w]] + less)
                if after < least:
                    least, moves = after, [(v, lanes[w]), (w, busiest)]
    return moves
