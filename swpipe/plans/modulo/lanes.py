"""Which thread runs which task: ways to spread host work over a number of threads.

A way is worth trying when no thread has more host work than the initiation interval. They come in
the order in which they are to be tried:

1. *Along the iteration*: the last tasks stay with the caller as long as its period has room, those
   before them go to the next thread, and so on. Few edges cross threads.
2. *Exchanged*: segments of the iteration as long as each other, evened out by moving or swapping
   single tasks. Few edges cross threads, and the load is nearly even.
3. *Balanced*: the longest task first, to the thread with the least work; then pairs of threads
   share their tasks anew, as evenly as a knapsack can. It finds room where the first way does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

from swpipe.plans.modulo.loop_graph import LoopGraph

EPS_US = 1e-6

_STARTS = 3
"""How many balanced ways to look for."""

_SEGMENTS = 4
"""How many ways to begin exchanging."""

_STEPS = 20_000
"""Host times are rounded to a part of their sum in the knapsack."""


Way: TypeAlias = tuple[int, ...]
"""Task to its thread."""

Choice: TypeAlias = tuple[tuple[int, ...], ...]
"""Task to the threads that it may run on."""


def lane_ways(graph: LoopGraph, threads: int) -> list[Way]:
    """Ways to spread host work as evenly as can be, whatever the interval; the best first."""
    if threads == 1:
        return [(0,) * graph.size]
    ways = [_exchanged(graph, threads, start) for start in range(_SEGMENTS)]
    ways += [_balanced(graph, threads), _clustered(graph, threads)]
    ways += [_balanced(graph, threads, start) for start in range(1, _STARTS)]
    return list(dict.fromkeys(ways))


def lane_choices(
    graph: LoopGraph, threads: int, period_us: float, ways: Sequence[Way]
) -> list[Choice]:
    """What to try at an interval: distinct choices, the caller's thread being 0, best first."""
    if threads == 1:
        return [((0,),) * graph.size]
    any_lane = tuple(range(threads))
    anywhere = tuple((0,) if v in graph.frozen else any_lane for v in range(graph.size))
    fitted = (_along(graph, threads, period_us), _longest_fit(graph, threads, period_us))
    fixed = [
        tuple((lane,) for lane in way)
        for way in (*fitted, *ways)
        if way is not None and _fits(graph, way, period_us)
    ]
    return list(dict.fromkeys([anywhere, *fixed]))


def least_load(graph: LoopGraph, ways: Sequence[Way]) -> float:
    """What the busiest thread has to do in the most even of these ways."""
    return min(max(_loads(graph, way)) for way in ways)


def _fits(graph: LoopGraph, lanes: Sequence[int], period_us: float) -> bool:
    return max(_loads(graph, lanes)) <= period_us + EPS_US


def _loads(graph: LoopGraph, lanes: Sequence[int]) -> list[float]:
    loads = [0.0] * (max(lanes) + 1)
    for v, lane in enumerate(lanes):
        loads[lane] += graph.host_us[v]
    return loads


def _along(graph: LoopGraph, threads: int, period_us: float) -> tuple[int, ...] | None:
    lanes = [0] * graph.size
    free = [period_us] * threads
    free[0] -= sum(graph.host_us[v] for v in graph.frozen)
    lane = 0
    for v in reversed(graph.serial):
        if v in graph.frozen:
            continue
        while graph.host_us[v] > free[lane] + EPS_US:
            lane += 1
            if lane == threads:
                return None
        lanes[v] = lane
        free[lane] -= graph.host_us[v]
    return tuple(lanes)


def _exchanged(graph: LoopGraph, threads: int, start: int) -> tuple[int, ...]:
    """Segments of the iteration, evened out task by task; starts differ in their lengths."""
    host, frozen = graph.host_us, graph.frozen
    free = [v for v in graph.serial if v not in frozen]
    total, pinned = sum(host), sum(host[v] for v in frozen)
    lanes = [0] * graph.size
    loads = [0.0] * threads
    loads[0] = pinned
    lane = threads - 1
    for v in free:
        # The last segment is the caller's; each of the others ends a little sooner or later.
        quota = total / threads * (1 + 0.15 * ((start * 7 + lane * 3) % 5 - 2) * min(start, 1))
        if lane and loads[lane] + host[v] / 2 > quota:
            lane -= 1
        lanes[v] = lane
        loads[lane] += host[v]
    for _ in range(2 * graph.size):
        step = _exchange(graph, lanes, loads, free)
        if step is None:
            break
        for v, to in step:
            loads[lanes[v]] -= host[v]
            loads[to] += host[v]
            lanes[v] = to
    return tuple(lanes)


def _exchange(
    graph: LoopGraph, lanes: Sequence[int], loads: Sequence[float], free: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """The move or swap that relieves the busiest thread most; None where none does."""
    host = graph.host_us
    a = max(range(len(loads)), key=lambda k: loads[k])
    best = loads[a] - EPS_US
    step: tuple[tuple[int, int], ...] | None = None
    for v in free:
        if lanes[v] != a:
            continue
        for b in range(len(loads)):
            if b != a:
                after = max(loads[a] - host[v], loads[b] + host[v])
                if after < best:
                    best, step = after, ((v, b),)
        for w in free:
            b = lanes[w]
            if b != a:
                change = host[v] - host[w]
                after = max(loads[a] - change, loads[b] + change)
                if after < best:
                    best, step = after, ((v, b), (w, a))
    return step


def _longest_fit(graph: LoopGraph, threads: int, period_us: float) -> tuple[int, ...] | None:
    """First fit, the longest task first: the caller's thread is filled before the next begins."""
    lanes = [0] * graph.size
    free = [period_us] * threads
    free[0] -= sum(graph.host_us[v] for v in graph.frozen)
    for v in sorted(range(graph.size), key=lambda v: (-graph.host_us[v], v)):
        if v in graph.frozen:
            continue
        lane = next((k for k in range(threads) if graph.host_us[v] <= free[k] + EPS_US), None)
        if lane is None:
            return None
        lanes[v] = lane
        free[lane] -= graph.host_us[v]
    return tuple(lanes)


def _clustered(graph: LoopGraph, threads: int) -> tuple[int, ...]:
    """The users of the busiest resource on one thread, where they cannot be in each other's way."""
    load = [
        sum(h.time_us for hs in graph.holds[: graph.size] for h in hs if h.what == what)
        for what in range(len(graph.resources))
    ]
    busiest = max(range(len(load)), key=lambda what: load[what], default=-1)
    users = {
        v for v in range(graph.size) if any(h.what == busiest for h in graph.holds[v])
    } - graph.frozen
    loads = [0.0] * threads
    loads[0] = sum(graph.host_us[v] for v in graph.frozen)
    lanes = [0] * graph.size
    clusters = [sorted(users)] if users else []
    clusters += [[v] for v in range(graph.size) if v not in users and v not in graph.frozen]
    for cluster in sorted(clusters, key=lambda vs: -sum(graph.host_us[v] for v in vs)):
        lane = min(range(threads), key=lambda k: (loads[k], k))
        for v in cluster:
            lanes[v] = lane
            loads[lane] += graph.host_us[v]
    return tuple(lanes)


def _balanced(graph: LoopGraph, threads: int, start: int = 0) -> tuple[int, ...]:
    """The longest task first; other starts begin from another spread, each from its own."""
    lanes = [0] * graph.size
    loads = [0.0] * threads
    loads[0] = sum(graph.host_us[v] for v in graph.frozen)
    for v in sorted(range(graph.size), key=lambda v: (-graph.host_us[v], v)):
        if v not in graph.frozen:
            lanes[v] = min(range(threads), key=lambda k: (loads[k], k))
            if start:
                lanes[v] = ((v + 1) * 2654435761 * start >> 9) % threads
            loads[lanes[v]] += graph.host_us[v]
    step = max(sum(graph.host_us) / _STEPS, EPS_US)
    for _ in range(2 * threads):
        before = list(lanes)
        for a, b in combinations(range(threads), 2):
            _share(graph, lanes, a, b, step, start)
        if lanes == before:
            break
    return tuple(lanes)


def _share(graph: LoopGraph, lanes: list[int], a: int, b: int, step_us: float, start: int) -> None:
    """Spread the tasks of two threads over the two as evenly as can be."""
    pinned = sum(graph.host_us[v] for v in graph.frozen) if a == 0 else 0.0
    tasks = [v for v, lane in enumerate(lanes) if lane in (a, b) and v not in graph.frozen]
    tasks.sort(key=lambda v: v * (7 * start + 1) % 31)  # of equal ways the last tasks' is taken
    total = sum(graph.host_us[v] for v in tasks)
    before = max(
        pinned + sum(graph.host_us[v] for v in tasks if lanes[v] == a),
        sum(graph.host_us[v] for v in tasks if lanes[v] == b),
    )
    weights = [round(graph.host_us[v] / step_us) for v in tasks]
    sums = [1]  # bit w: some of the tasks so far weigh w together
    for weight in weights:
        sums.append(sums[-1] | sums[-1] << weight)
    wanted = max(0, round(((total - pinned) / 2) / step_us))
    taken = _nearest(sums[-1], wanted)
    chosen: set[int] = set()
    for k in range(len(tasks) - 1, -1, -1):
        if not sums[k] >> taken & 1:
            chosen.add(tasks[k])
            taken -= weights[k]
    on_a = sum(graph.host_us[v] for v in chosen)
    if max(pinned + on_a, total - on_a) < before - EPS_US:
        for v in tasks:
            lanes[v] = a if v in chosen else b


def _nearest(bits: int, wanted: int) -> int:
    """The number of the set bit that is nearest to ``wanted``."""
    low = (bits & ((2 << wanted) - 1)).bit_length() - 1
    rest = bits >> wanted
    high = wanted + ((rest & -rest).bit_length() - 1) if rest else low
    return low if wanted - low <= high - wanted else high
