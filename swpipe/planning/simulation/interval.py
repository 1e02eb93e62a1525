"""The interval of a timed graph in the steady state, and the reason for it."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.simulation.cycles import (
    TICKS_PER_US,
    ArcCycle,
    heaviest_cycle,
    in_words,
)
from swpipe.planning.simulation.event_simulator import UNBOUNDED, EventSimulator
from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph, timed_graph
from swpipe.program import OWN, compile_plan

LONGEST_RUN = 16
"""The largest number of iterations to simulate, in multiples of the graph's reach."""

LEAD = 4
"""The number of iterations before the sampled ones, in multiples of the graph's reach."""


class Interval(NamedTuple):
    """The time from one iteration to the next in the steady state, exactly or as a mean."""

    ii_us: float
    exact: bool


def interval_of(graph: TimedGraph) -> Interval:
    """Return the interval of a program's graph."""
    if graph.sampled:
        return _sampled_interval(graph)
    _, busy = graph.busiest()
    cycle = heaviest_cycle(len(graph.nodes), (*graph.arcs, *graph.steady), above=busy)
    bound_us = busy / TICKS_PER_US if cycle is None else cycle.ratio_us
    # Without contention this bound is the interval itself.
    if not graph.contended:
        return Interval(bound_us, exact=True)
    simulated = _simulated_interval(graph.limited())
    return simulated._replace(ii_us=max(simulated.ii_us, bound_us))


def interval_us(plan: PipelinePlan, costs: CostModel, *, streams: bool) -> float:
    """Return the interval in microseconds of a validated plan, by the mean costs."""
    program = compile_plan(resolve_plan(plan), streams=streams)
    return interval_of(timed_graph(program, costs)).ii_us


def _sampled_interval(graph: TimedGraph) -> Interval:
    """Return the mean interval over the sampled iterations; exact if rounds take equal times."""
    # Round up to whole rounds of the samples, so that each measured round has every sample once.
    lead = -(-LEAD * graph.reach // graph.sampled) * graph.sampled
    ends = [lead + turn * graph.sampled for turn in range(3)]
    graph = graph.limited()
    # More iterations follow the measured ones, so that these do not find the threads idle.
    run = EventSimulator(graph, ends[-1] + graph.in_flight + graph.reach)
    retired = [run.retired(end) for end in ends]
    passes = [late - early for early, late in pairwise(retired)]
    mean_us = fmean(passes) / graph.sampled / TICKS_PER_US
    return Interval(mean_us, exact=len({*passes}) == 1)


def _simulated_interval(graph: TimedGraph) -> Interval:
    """Return the exact interval of a run that repeats, or else the mean of a long run."""
    run = EventSimulator(graph, UNBOUNDED)
    size = run.size
    offsets = [node.stage * size + k for k, node in enumerate(graph.nodes)]
    retired: list[int] = []
    shapes: deque[tuple[int, ...]] = deque(maxlen=_memory(graph))
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    for i in range(LONGEST_RUN * graph.reach):
        retired.append(run.retired(i))
        # The shape of the iteration: all ends relative to its retirement, and the time since the
        # last one.
        done = retired[i]
        end = run.end
        first = i * size
        shapes.append((done - retired[i - 1], *[end[first + offset] - done for offset in offsets]))
        # The last shapes determine all later iterations: if the same ones were there before, the
        # run repeats from there on.
        before = seen.setdefault(tuple(shapes), i)
        if before < i:
            return Interval((done - retired[before]) / (i - before) / TICKS_PER_US, exact=True)
    # The run did not repeat: the first half may contain the way to the steady state.
    half = len(retired) // 2
    taken = retired[-1] - retired[half]
    return Interval(taken / (len(retired) - 1 - half) / TICKS_PER_US, exact=False)


def _memory(graph: TimedGraph) -> int:
    """Return the number of consecutive iterations that determine all later ones.

    When the device has finished the first of ``in_flight`` + 1 iterations, it has finished all
    iterations before, and at most those after are in flight; their own shapes determine how they
    continue. Earlier iterations matter only through a thread's wake-up time, as far back as a wait
    reaches.
    """
    nodes = graph.nodes
    back = (
        lag - nodes[head].stage + nodes[tail].stage
        for tail, head, time, lag in graph.arcs
        if time > nodes[tail].time
    )
    return graph.in_flight + max([1, *back])


# ---------------------------------------------------------------------------------- the limit


class Limit(NamedTuple):
    """The reason for an interval.

    Attributes:
        text: The full description.
        what: The resource that is always busy, such as "thread 'io'"; "" for a cycle of tasks that
            wait for each other, and if nothing limits the interval.
        tasks: The tasks that use the resource, or are in the cycle.
    """

    text: str
    what: str = ""
    tasks: tuple[str, ...] = ()


def limit_of(graph: TimedGraph, ii_us: float) -> Limit:
    """Return what limits an interval.

    It is a resource that is always busy, or a cycle of tasks that wait for each other, or else
    contention, under which no fixed cycle determines the interval.
    """
    if not ii_us:
        return Limit("nothing")
    use, busy = graph.busiest()
    if ii_us <= busy / TICKS_PER_US:
        kind, name = use
        what = f"the {name}" if kind == "lock" else f"{kind} {name!r}"
        state = "busy" if kind in ("thread", "stream") else "taken"
        tasks = tuple(task for task, time in graph.load[use].items() if time)
        return Limit(f"{what}, always {state}: {', '.join(tasks)}", what, tasks)
    cycle = heaviest_cycle(len(graph.nodes), (*graph.arcs, *graph.steady))
    if cycle is not None and ii_us <= cycle.ratio_us:
        return _of_cycle(graph, cycle)
    nodes = graph.nodes
    if graph.sampled:
        return Limit(f"iterations that differ: {graph.depth} in flight do not even them out")
    wanted = {f"stream {nodes[node].row.name!r}" for node in graph.queues}
    wanted |= {f"resource {what!r}" for node in nodes for what in node.resources}
    wanted |= {f"the {LOCK}" for node in nodes if node.lock}
    return Limit(f"contention for {', '.join(sorted(wanted))}")


def _of_cycle(graph: TimedGraph, cycle: ArcCycle) -> Limit:
    nodes = graph.nodes
    arcs = cycle.arcs
    # Start at the earliest stage, so that the text begins with iteration i and reads in order.
    first = min(range(len(arcs)), key=lambda k: (nodes[arcs[k].tail].stage, arcs[k].tail))
    arcs = (*arcs[first:], *arcs[:first])
    steps = []
    for tail, head, _, lag in (*arcs, arcs[0]):
        node = nodes[tail]
        host = " (host)" * (bool(graph.device_of) and node.row.kind == "thread")
        name = f"{node.task}{host}" if node.time or node.task in OWN else ""
        steps.append((name, lag - nodes[head].stage + node.stage))
    tasks = dict.fromkeys(nodes[arc.tail].task for arc in arcs)
    return Limit(
        f"a cycle, {in_ms(cycle.ratio_us)} per iteration: {in_words(steps)}",
        tasks=tuple(task for task in tasks if task not in OWN),
    )
