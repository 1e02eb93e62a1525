"""Host work shared out to threads as evenly as can be, and how even that is at best.

The longest task goes to the thread with the least work; then tasks are moved and swapped while that
relieves the busiest thread. That is hardly ever far from the best; what the best is, is found by
trying all ways that might still be better ("branch and bound"), where there are not too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swpipe.planning.modulo.compiled import Real, Whole, compiled, real, whole
from swpipe.planning.modulo.loop_graph import LoopGraph

EPS_US = 1e-6

_MOST_NODES = 10_000
"""Tasks placed before the search for a better way is given up."""

_FEW = 24
"""In loops of more tasks than this, work is shared out evenly whatever the tasks are like."""


def least_load(graph: LoopGraph, threads: int) -> float:
    """The host work of the busiest thread where it is shared out best, or a lower bound of it."""
    pinned = sum(graph.host_us[v] for v in graph.frozen)
    even = max(sum(graph.host_us) / threads, *graph.host_us, pinned)
    if graph.size > _FEW:
        return even
    loads = [0.0] * threads
    for v, lane in enumerate(shared_out(graph, threads)):
        loads[lane] += graph.host_us[v]
    if max(loads) <= even + EPS_US:
        return even
    free = [v for v in range(graph.size) if v not in graph.frozen]
    work = sorted((graph.host_us[v] for v in free), reverse=True)
    ways = _Ways(
        work=real(work),
        left=real(sum(work[k:]) for k in range(len(work) + 1)),
        loads=real([pinned, *[0.0] * (threads - 1)]),
        lanes=whole([0] * threads * len(work)),
        tried=whole([0] * len(work)),
        lane=whole([-1] * len(work)),
        before=real([0.0] * len(work)),
    )
    least, nodes = _all_ways(ways, max(loads), even)
    return even if nodes > _MOST_NODES else least


class _Ways(NamedTuple):
    """All ways to place work on threads that might be better than the best so far.

    Attributes:
        work: What is to be placed, the longest first.
        left: What is still to be placed from each on, it too.
        loads: What the threads have.
        lanes: ``k * threads`` to the threads in the order in which they are tried for work k.
        tried: Work to how many were.
        lane: Work to its thread; -1 for none.
        before: Work to what that thread had before.
    """

    work: Real
    left: Real
    loads: Real
    lanes: Whole
    tried: Whole
    lane: Whole
    before: Real


@compiled
def _all_ways(ways: _Ways, least: float, enough: float) -> tuple[float, int]:
    """The busiest thread's load in the best way, and how often something was placed."""
    loads, threads, nodes, k = ways.loads, len(ways.loads), 0, 0
    _by_load(ways, 0)
    while k >= 0:
        if ways.lane[k] >= 0:
            loads[ways.lane[k]], ways.lane[k] = ways.before[k], -1
        turn = ways.tried[k]
        if turn == threads or nodes > _MOST_NODES or least <= enough + EPS_US:
            k -= 1
            continue
        ways.tried[k] += 1
        lane = ways.lanes[k * threads + turn]
        load = loads[lane]
        if load + ways.work[k] >= least - EPS_US:
            ways.tried[k] = threads  # nor do those with more
            continue
        if turn and loads[ways.lanes[k * threads + turn - 1]] == load:
            continue  # the same again
        nodes += 1
        ways.lane[k], ways.before[k], loads[lane] = lane, load, load + ways.work[k]
        if k + 1 == len(ways.work):
            least = 0.0
            for each in loads:
                least = max(least, each)
        elif _room(ways, least) >= ways.left[k + 1]:
            k += 1
            _by_load(ways, k)
    return least, nodes


@compiled
def _room(ways: _Ways, least: float) -> float:
    """What still fits, less what no thread can take even the shortest of."""
    shortest, room = ways.work[len(ways.work) - 1], 0.0
    for load in ways.loads:
        if least - load > shortest:
            room += least - load
    return room


@compiled
def _by_load(ways: _Ways, k: int) -> None:
    """Have the thread with the least work tried first."""
    threads = len(ways.loads)
    ways.tried[k] = 0
    for lane in range(threads):
        place = k * threads + lane
        while place > k * threads and ways.loads[ways.lanes[place - 1]] > ways.loads[lane]:
            ways.lanes[place] = ways.lanes[place - 1]
            place -= 1
        ways.lanes[place] = lane


def shared_out(graph: LoopGraph, threads: int) -> list[int]:
    """Task to a thread, host work shared out evenly."""
    host, frozen = graph.host_us, graph.frozen
    free = [v for v in range(graph.size) if v not in frozen]
    load = [0.0] * threads
    load[0] = sum(host[v] for v in frozen)
    lanes = [0] * graph.size
    for v in sorted(free, key=lambda v: (-host[v], v)):
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
