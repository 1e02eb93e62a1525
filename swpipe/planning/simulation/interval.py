"""The interval of a timed graph in the steady state, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from swpipe._engine.program import ADMIT, OWN, compile_plan
from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.simulation.cycles import TICKS_PER_US, Cycle, heaviest_cycle
from swpipe.planning.simulation.event_simulator import UNBOUNDED, EventSimulator, simulate_run
from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph, timed_graph
from swpipe.trace.span import Row

LONGEST_RUN = 16
"""How many iterations to simulate at most, in multiples of the graph's reach."""

LONGEST_PATTERN = 12
"""Iterations in the longest repeating pattern that is searched for."""


class Interval(NamedTuple):
    """From one iteration to the next in the steady state: exactly, or as a mean."""

    ii_us: float
    exact: bool


def interval_of(graph: TimedGraph, enough_us: float = math.inf) -> Interval:
    """The interval of a program's graph.

    Args:
        graph: The graph.
        enough_us: If a lower bound shows that the interval is at least this, the bound is returned
            and nothing is simulated.
    """
    busiest = max(graph.load.values())
    cycle = heaviest_cycle(len(graph.nodes), (*graph.arcs, *graph.steady), above=busiest)
    bound_us = busiest / TICKS_PER_US if cycle is None else cycle.ratio_us
    if not graph.contended or bound_us >= enough_us:
        return Interval(bound_us, exact=True)
    ii_us, exact = _simulated_interval(graph.limited())
    return Interval(max(ii_us, bound_us), exact)


def interval_us(
    plan: PipelinePlan, costs: CostModel, *, streams: bool, enough_us: float = math.inf
) -> float:
    """The interval in microseconds of a validated plan; ``enough_us`` as for ``interval_of``."""
    program = compile_plan(resolve_plan(plan), streams=streams)
    return interval_of(timed_graph(program, costs, streams=streams), enough_us).ii_us


def _simulated_interval(graph: TimedGraph) -> tuple[float, bool]:
    """The interval of a run that repeats, or the mean of a long run; whether it is exact."""
    run = EventSimulator(graph, UNBOUNDED)
    size, memory = run.size, _memory(graph)
    offsets = [node.stage * size + k for k, node in enumerate(graph.nodes)]
    retired: list[int] = []
    shapes: list[tuple[int, ...]] = []
    # Pattern length to the number of consecutive iterations equal to the one so many before.
    equal = [0] * (LONGEST_PATTERN + 1)
    for i in range(LONGEST_RUN * graph.reach):
        retired.append(run.retired(i))
        # All ends in the iteration, relative to its retirement; and the time since the last one.
        done, end, first = retired[i], run.end, i * size
        shape = (done - retired[i - 1], *[end[first + offset] - done for offset in offsets])
        shapes.append(shape)
        for pattern in range(1, min(i, LONGEST_PATTERN) + 1):
            equal[pattern] = equal[pattern] + 1 if shapes[i - pattern] == shape else 0
            if equal[pattern] == memory:
                return (done - retired[i - pattern]) / pattern / TICKS_PER_US, True
    half = len(retired) // 2
    taken = retired[-1] - retired[half]
    return taken / (len(retired) - 1 - half) / TICKS_PER_US, False


def _memory(graph: TimedGraph) -> int:
    """How many consecutive iterations determine all later ones.

    When the device has done the first of ``in_flight`` + 1 iterations, it has done all before it,
    and at most those after it are in flight; their own shapes show how they continue. Earlier
    iterations matter only through a thread's wake-up time, as far back as a wait reaches.
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
    """What limits an interval.

    Attributes:
        text: In full.
        what: What is always busy, such as "thread 'io'"; "" for a cycle of tasks that wait for
            each other, and where nothing does.
        tasks: The tasks on it, or in the cycle.
    """

    text: str
    what: str = ""
    tasks: tuple[str, ...] = ()


def limit_of(graph: TimedGraph, ii_us: float) -> Limit:
    """What limits an interval: what is always busy, or a cycle of tasks that wait for each other.

    It can take long to find.
    """
    if not ii_us:
        return Limit("nothing")
    key, load = max(graph.load.items(), key=lambda item: item[1])
    if ii_us <= load / TICKS_PER_US:
        return _of_load(graph, key)
    cycle = heaviest_cycle(len(graph.nodes), (*graph.arcs, *graph.steady))
    if cycle is not None and ii_us <= cycle.ratio_us:
        return _of_cycle(graph, cycle)
    graph = graph.limited()
    for length in (3, LONGEST_RUN):  # a short run shows most cycles of waits
        found = _of_chain(simulate_run(graph, length * graph.reach), ii_us)
        if found is not None:
            return found
    return Limit("contention between tasks, without a repeating pattern")


def _of_load(graph: TimedGraph, key: Row | str) -> Limit:
    if isinstance(key, Row):
        what, state = f"{key.kind} {key.name!r}", "busy"
    else:
        what, state = f"the {key}" if key == LOCK else f"resource {key!r}", "taken"
    tasks = graph.users[key]
    return Limit(f"{what}, always {state}: {', '.join(tasks)}", what, tasks)


def _of_cycle(graph: TimedGraph, cycle: Cycle) -> Limit:
    nodes = graph.nodes
    steps, iteration = [], 0
    arcs = cycle.arcs
    first = min(range(len(arcs)), key=lambda k: (nodes[arcs[k].tail].stage, arcs[k].tail))
    for tail, head, _, lag in (*arcs[first:], *arcs[:first]):
        steps.append(_Step(tail, iteration))
        iteration += lag - nodes[head].stage + nodes[tail].stage
    return _of_path(graph, steps, iteration, cycle.ratio_us)


def _of_chain(run: EventSimulator, ii_us: float) -> Limit | None:
    """Follow back what each execution waited for last, until it repeats; None if it never does."""
    graph = run.graph
    size, nodes = len(graph.nodes), graph.nodes
    path: list[int] = []
    execution = run.execution(graph.retire, _last_unaffected(run))
    met: dict[int, list[int]] = {}
    while execution >= 0:
        period, k = divmod(execution, size)
        for place in met.get(k, ()):
            periods = path[place] // size - period
            took_us = (run.start[path[place]] - run.start[execution]) / TICKS_PER_US
            if periods and abs(took_us - periods * ii_us) <= 1e-6 * took_us:
                cycle = [*reversed(path[place + 1 :]), path[place]]
                steps = [
                    _Step(t % size, t // size - nodes[t % size].stage) for t in (execution, *cycle)
                ]
                return _of_path(graph, steps[:-1], periods, ii_us, steps[0].iteration)
        met.setdefault(k, []).append(len(path))
        path.append(execution)
        execution = run.bound_by[execution]
    return None


def _last_unaffected(run: EventSimulator) -> int:
    """The last iteration retired before the end of the run could have had any effect."""
    graph, missing = run.graph, run.iterations
    admit = next(k for k, node in enumerate(graph.nodes) if node.task == ADMIT)
    execution = run.execution(admit, missing)
    if execution >= len(run.end):
        return missing - 1
    return max(i for i in range(missing) if i == 0 or run.retired(i) <= run.end[execution])


class _Step(NamedTuple):
    node: int
    iteration: int


def _of_path(
    graph: TimedGraph, steps: Sequence[_Step], distance: int, ratio_us: float, origin: int = 0
) -> Limit:
    """A cycle that begins and ends with the same task, ``distance`` iterations later."""
    words: list[str] = []
    for node, iteration in (*steps, _Step(steps[0].node, steps[0].iteration + distance)):
        number = iteration - origin
        word = f"{graph.nodes[node].task} {'i' if not number else f'i{number:+d}'}"
        if graph.device_of and graph.nodes[node].row.kind == "thread":
            word += " (host)"
        if graph.nodes[node].time or graph.nodes[node].task in OWN:
            words.append(word)
    tasks = dict.fromkeys(graph.nodes[node].task for node, _ in steps)
    return Limit(
        f"a cycle, {in_ms(ratio_us)} per iteration: {' -> '.join(words)}",
        tasks=tuple(task for task in tasks if task not in OWN),
    )
