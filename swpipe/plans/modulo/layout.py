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

from swpipe.dependence import CycleError, topological
from swpipe.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.plans.modulo.iterative import Schedule
from swpipe.plans.modulo.loop_graph import LoopGraph

EPS_US = 1e-6

_MOST_CUTS = 12
"""So many are tried, evenly spread, where a period could be cut in more places."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a planner chooses, in numbers of tasks.

    Attributes:
        lanes: Task to its thread; 0 is the caller's.
        stages: Task to its stage, from 0.
        order: The tasks in the order of a period.
        depth: Iterations in flight that the start times ask for.
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
    cuts = cuts[:: max(1, len(cuts) // _MOST_CUTS)]
    found: dict[tuple[int, ...], Layout] = {}
    for cut in cuts:
        layout = _cut(graph, times, cut * EPS_US)
        if layout is not None:
            found.setdefault((*layout.stages, *layout.order), layout)
    return sorted(found.values(), key=lambda each: each.depth)


def _cut(graph: LoopGraph, times: Schedule, cut_us: float) -> Layout | None:
    period, n = times.period_us, graph.size
    turns = [math.floor((at - cut_us) / period + 1e-9) for at in times.host_us]
    host = [at - turn * period for at, turn in zip(times.host_us, turns, strict=True)]
    device = [at - turn * period for at, turn in zip(times.device_us, turns, strict=True)]
    blur = times.blur_us / period + 1e-9
    stages = _stages(graph, [*host, *device], period, blur)
    if stages is None:
        return None
    rank = {v: (round(host[v] / EPS_US), round(device[v] / EPS_US), v) for v in range(n)}
    try:
        order = period_of(graph, stages, rank)
    except CycleError:
        return None
    moved = Schedule(
        period,
        times.lanes,
        tuple(at + stage * period for at, stage in zip(host, stages, strict=True)),
        tuple(at + stage * period for at, stage in zip(device, stages, strict=True)),
        times.blur_us,
    )
    return Layout(times.lanes, tuple(stages), order, _depth(graph, moved, stages))


def period_of(
    graph: LoopGraph, stages: Sequence[int], rank: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The tasks in the order of a period, those of least rank first where dependences let them.

    Raises:
        CycleError: The dependences within a period form a cycle.
    """
    edges = [(str(c), str(p)) for c, p, d in graph.deps if stages[c] - stages[p] + d == 0]
    return tuple(map(int, topological({str(v): at for v, at in rank.items()}, edges)))


def _stages(
    graph: LoopGraph, offsets: Sequence[float], period: float, blur: float
) -> list[int] | None:
    """The least stages for these starts within a period; None where there are none.

    Whole periods may lie between any two tasks: no resource is taken at another time for it.
    """
    n, stages = graph.size, [0] * graph.size
    arcs = []
    for tail, head, time_us, distance in graph.edges:
        if tail % n != head % n:
            gap = (offsets[tail] + time_us - offsets[head]) / period
            arcs.append((tail % n, head % n, math.ceil(gap - blur) - distance))
    last = min(graph.last, default=-1)
    if last >= 0:
        arcs += [(v, last, 0) for v in range(n)] + [(last, v, 0) for v in graph.last]
    for _ in range(n + 1):
        changed = False
        for tail, head, periods in arcs:
            if stages[tail] + periods > stages[head]:
                stages[head] = stages[tail] + periods
                changed = True
        if not changed:
            return stages
    return None


def _depth(graph: LoopGraph, times: Schedule, stages: Sequence[int]) -> int:
    """How many iterations are in flight between the first start of one and its last end."""
    period = times.period_us
    ends = [
        (device + graph.device_us[v]) if graph.streams else host + graph.host_us[v]
        for v, (host, device) in enumerate(zip(times.host_us, times.device_us, strict=True))
    ]
    needed = (max(ends) - min(times.host_us)) / period
    if graph.streams:
        # <retire> stands in the caller's stream, behind all of its iteration, before all that the
        # next period submits there.
        needed = max(
            needed,
            *(
                (max(ends) - device) / period + stages[v]
                for v, device in enumerate(times.device_us)
                if graph.stream[v] == 0
            ),
            0,
        )
    return max(max(stages) + 1, math.ceil(needed - times.blur_us / period - 1e-9))


def plan_of(
    base: PipelinePlan, graph: LoopGraph, layout: Layout, depth: int
) -> PipelinePlan | None:
    """The plan; None where ``same_period_deps`` of ``base`` cannot be said in it."""
    groups = _group_names(base, layout.lanes)
    schedule = {
        name: replace(entry, stage=layout.stages[v], thread_group=groups[layout.lanes[v]])
        for v, (name, entry) in enumerate(base.schedule.items())
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
    return PipelinePlan(
        schedule=schedule,
        deps=within,
        cross_iter_deps=across,
        same_period_deps=same,
        order=[graph.names[v] for v in layout.order],
        streams=base.streams,
        pipeline_depth=depth,
        stale=base.stale,
        tasks=base.tasks,
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
