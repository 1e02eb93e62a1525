"""From start times to a plan: where a period is cut, and what stages, order and depth come of it.

    caller's thread   ... | step 0   forward 1  backward 1 | step 1   forward 2 ...
    a worker              |    read 3 .......... copy 2    |    read 4 ...
                          cut                              cut

The caller's thread runs from ``<admit>`` to ``<retire>``: a period can be cut wherever one of its
tasks begins. A task's stage is the number of cuts between the first of its iteration and its own
start; the order of a period is that of the starts after the cut.

Each cut makes another plan: an iteration's first task and its last lie in more periods or fewer,
frozen tasks must be in the last stage. The plan with the least depth is the one to take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

from swpipe.core.dependence import CycleError, topological
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.planning.modulo.loop_graph import LoopGraph

EPS_US = 1e-6

_MOST_CUTS = 12
"""So many are tried, evenly spread, where a period could be cut in more places."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start times of one iteration; all others follow ``period_us`` apart.

    Attributes:
        period_us: The initiation interval.
        lanes: Task to the number of its thread; 0 is the caller's.
        host_us: Task to the start of its host work, in microseconds.
        device_us: Task to the start of its device work; without streams the end of its host work.
    """

    period_us: float
    lanes: tuple[int, ...]
    host_us: tuple[float, ...]
    device_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a planner chooses, in numbers of tasks.

    Attributes:
        lanes: Task to its thread; 0 is the caller's.
        stages: Task to its stage, from 0.
        order: The tasks in the order of a period.
        depth: Iterations in flight.
    """

    lanes: tuple[int, ...]
    stages: tuple[int, ...]
    order: tuple[int, ...]
    depth: int


def layouts(graph: LoopGraph, times: Schedule) -> list[Layout]:
    """Ways to cut a period, the least depth first; none where no cut suits frozen tasks."""
    period = times.period_us
    callers = [v for v in range(graph.size) if times.lanes[v] == 0] or range(graph.size)
    cuts = sorted({0, *(round(times.host_us[v] % period / EPS_US) for v in callers)})
    cuts = cuts[:: math.ceil(len(cuts) / _MOST_CUTS)]
    gaps = _gaps(graph, times)
    moves: list[int] | None = None
    found: dict[tuple[int, ...], Layout] = {}
    for cut in cuts:
        turns = [math.floor((at - cut * EPS_US) / period + 1e-9) for at in times.host_us]
        # From cut to cut turns only fall, and so the least moves only grow.
        least = [-turn for turn in turns]
        moves = _pushed(gaps, least if moves is None else list(map(max, moves, least)))
        if moves is None:
            break
        layout = _layout(graph, times, turns, _all_last(graph, gaps, turns, moves))
        if layout is not None:
            found.setdefault((*layout.stages, *layout.order), layout)
    return sorted(found.values(), key=lambda each: each.depth)


class _Gap(NamedTuple):
    """The head is moved by no less than ``periods`` more than the tail."""

    tail: int
    head: int
    periods: int


def _gaps(graph: LoopGraph, times: Schedule) -> list[_Gap]:
    """What binds moves by whole periods: no resource is taken at another time of the period."""
    n, period, start = graph.size, times.period_us, (*times.host_us, *times.device_us)
    gaps: dict[tuple[int, int], int] = {}
    for tail, head, time_us, distance in graph.edges:
        if tail % n != head % n:
            pair = tail % n, head % n
            periods = math.ceil((start[tail] + time_us - start[head]) / period - 1e-9) - distance
            gaps[pair] = max(periods, gaps.get(pair, periods))
    return [_Gap(tail, head, periods) for (tail, head), periods in gaps.items()]


def _pushed(gaps: Sequence[_Gap], moves: list[int]) -> list[int] | None:
    """The least moves that are no less than these, and keep the gaps; None where none do."""
    moves = list(moves)
    for _ in range(len(moves) + 1):
        changed = False
        for tail, head, periods in gaps:
            if moves[tail] + periods > moves[head]:
                moves[head] = moves[tail] + periods
                changed = True
        if not changed:
            return moves
    return None


def _all_last(
    graph: LoopGraph, gaps: Sequence[_Gap], turns: Sequence[int], moves: list[int]
) -> list[int] | None:
    """Moves that bring those that must be there into the last stage; None where none do."""
    if not graph.last:
        return moves
    last = max(map(add, moves, turns))
    late = [last - turn if v in graph.last else moves[v] for v, turn in enumerate(turns)]
    pushed = _pushed(gaps, late)
    # What they push beyond themselves stays beyond them, however late they are.
    return pushed if pushed is not None and max(map(add, pushed, turns)) == last else None


def _layout(
    graph: LoopGraph, times: Schedule, turns: Sequence[int], moves: Sequence[int] | None
) -> Layout | None:
    """What the moves make of a cut; None where they are none, or tasks wait for each other."""
    if moves is None:
        return None
    period = times.period_us
    stages = tuple(map(add, moves, turns))
    starts = zip(times.host_us, times.device_us, turns, strict=True)
    rank = [
        (round((host - turn * period) / EPS_US), round((device - turn * period) / EPS_US), v)
        for v, (host, device, turn) in enumerate(starts)
    ]
    try:
        order = period_of(graph, stages, rank)
    except CycleError:
        return None
    return Layout(times.lanes, stages, order, _depth(graph, times, stages, moves))


def period_of(
    graph: LoopGraph,
    stages: Sequence[int],
    rank: Mapping[int, tuple[int, ...]] | Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    """The tasks in the order of a period, those of least rank first where dependences let them.

    Raises:
        CycleError: The dependences within a period form a cycle.
    """
    edges = [(c, p) for c, p, d in graph.deps if stages[c] - stages[p] + d == 0]
    if all(rank[p] < rank[c] for c, p in edges):
        return tuple(sorted(range(graph.size), key=rank.__getitem__))
    names = {str(v): rank[v] for v in range(graph.size)}
    return tuple(map(int, topological(names, [(str(c), str(p)) for c, p in edges])))


def _depth(graph: LoopGraph, times: Schedule, stages: Sequence[int], moves: Sequence[int]) -> int:
    """How many iterations are in flight between the first start of one and its last end."""
    period = times.period_us
    host = [at + move * period for at, move in zip(times.host_us, moves, strict=True)]
    device = [at + move * period for at, move in zip(times.device_us, moves, strict=True)]
    begun, time_us = (device, graph.device_us) if graph.streams else (host, graph.host_us)
    end = max(at + us for at, us in zip(begun, time_us, strict=True))
    needed = (end - min(host)) / period
    if graph.streams:
        # <retire> stands in the caller's stream, behind all of its iteration, before all that the
        # next period submits there.
        callers = (v for v, stream in enumerate(graph.stream) if stream == 0)
        needed = max([needed, 0.0, *((end - device[v]) / period + stages[v] for v in callers)])
    return max(max(stages) + 1, math.ceil(needed - 1e-9))


def plan_of(
    base: PipelinePlan, graph: LoopGraph, layout: Layout, depth: int
) -> PipelinePlan | None:
    """The plan; None where ``same_period_deps`` of ``base`` cannot be said in it."""
    groups = _group_names(base, layout.lanes)
    schedule = {
        name: replace(entry, stage=stage, thread_group=groups[lane])
        for (name, entry), stage, lane in zip(
            base.schedule.items(), layout.stages, layout.lanes, strict=True
        )
    }
    stage = dict(zip(graph.names, layout.stages, strict=True))
    within, across, same = list(base.deps), list(base.cross_iter_deps), []
    for c, p in base.same_period_deps:
        distance = base.schedule[p].stage - base.schedule[c].stage
        if stage[p] - stage[c] == distance:
            same.append((c, p))
        elif distance == 0:
            within.append((c, p))
        elif distance > 0:
            across.append((c, p, distance))
        else:
            return None
    return replace(
        base,
        schedule=schedule,
        deps=within,
        cross_iter_deps=across,
        same_period_deps=same,
        order=[graph.names[v] for v in layout.order],
        pipeline_depth=depth,
    )


def _group_names(base: PipelinePlan, lanes: Sequence[int]) -> Mapping[int, str]:
    """Lane to the name of its group: one that its tasks had, where that is free."""
    names = {0: DEFAULT_GROUP}
    for lane in sorted(set(lanes) - {0}):
        members = (e for v, e in enumerate(base.schedule.values()) if lanes[v] == lane)
        names[lane] = next(_free_names([e.thread_group for e in members], set(names.values())))
    return names


def _free_names(wanted: Sequence[str], taken: set[str]) -> Iterator[str]:
    yield from (name for name in dict.fromkeys(wanted) if name not in taken)
    yield from (name for k in range(1, len(taken) + 2) if (name := f"worker {k}") not in taken)
