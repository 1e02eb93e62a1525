"""The steady-state interval of a timed graph, and what sets it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.plans.simulation.cycles import TICKS_PER_US, Cycle, heaviest_cycle
from swpipe.plans.simulation.playout import Playout, play
from swpipe.plans.simulation.timed_graph import LOCK, TimedGraph
from swpipe.program import ADMIT
from swpipe.trace.span import OWN, Row

LENGTHS = (3, 16)
"""How many times the system's memory is played before giving up on a repetition."""

LONGEST_PATTERN = 12
"""Iterations in the longest repetition that is looked for."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How fast the steady state goes.

    Attributes:
        ii_us: From one iteration to the next, in microseconds.
        exact: Whether that is exact, or a mean.
        limit: What sets it, in words.
    """

    ii_us: float
    exact: bool
    limit: str


def interval_of(graph: TimedGraph, enough_us: float = math.inf) -> Interval:
    """The interval of a program's graph.

    Args:
        graph: The graph.
        enough_us: To those who compare, an interval of this or more is as good as any other: where
            a bound shows that it is, the bound stands for it, and nothing is played.
    """
    cycle = heaviest_cycle(len(graph.nodes), graph.arcs)
    least_us = cycle.ratio_us if cycle is not None else 0.0
    if not graph.contended or least_us >= enough_us:
        return Interval(least_us, True, "nothing" if cycle is None else _cycle_words(graph, cycle))
    key, load = max(graph.load.items(), key=lambda item: item[1])
    taken_us = load / TICKS_PER_US
    found = _play_until_repeated(graph)
    ii_us = max(found.ii_us, taken_us, least_us)
    if ii_us <= taken_us:
        limit = _load_words(graph, key)
    elif cycle is not None and ii_us <= least_us:
        limit = _cycle_words(graph, cycle)
    else:
        limit = _chain_words(found)
    return Interval(ii_us, found.exact, limit)


# ------------------------------------------------------------------------------- repetition


@dataclass(frozen=True, slots=True)
class _Found:
    playout: Playout
    last: int
    """The last iteration that the run's end cannot have touched."""
    ii_us: float
    exact: bool


def _play_until_repeated(graph: TimedGraph) -> _Found:
    """The interval of a run that repeats itself tick for tick, or the mean of a long one."""
    # What is decided next depends on iterations in flight, and on those that arcs lead back to.
    memory = graph.depth + max(arc.distance for arc in graph.arcs) + 1
    for length in LENGTHS:
        playout = play(graph, length * memory)
        last = _untouched(playout)
        shapes = [_shape(playout, i) for i in range(last + 1)]
        for pattern in range(1, LONGEST_PATTERN + 1):
            if last + 1 < memory + pattern:
                break
            if shapes[-memory:] == shapes[-memory - pattern : -pattern]:
                taken = playout.retired(last) - playout.retired(last - pattern)
                return _Found(playout, last, taken / pattern / TICKS_PER_US, True)
    half = last // 2
    taken = playout.retired(last) - playout.retired(half)
    return _Found(playout, last, taken / max(1, last - half) / TICKS_PER_US, False)


def _untouched(playout: Playout) -> int:
    """The last iteration that was done before the first missing one could have been admitted."""
    graph, missing = playout.graph, playout.iterations
    admit = next(k for k, node in enumerate(graph.nodes) if node.task == ADMIT)
    turn = playout.turn(admit, missing)
    if turn >= len(playout.end):
        return missing - 1
    return max(i for i in range(missing) if i == 0 or playout.retired(i) <= playout.end[turn])


def _shape(playout: Playout, iteration: int) -> Hashable:
    """All that one iteration did, seen from its end and from the end of the one before."""
    done = playout.retired(iteration)
    step = done - playout.retired(iteration - 1) if iteration else 0
    nodes = range(len(playout.graph.nodes))
    return (step, *(playout.end[playout.turn(k, iteration)] - done for k in nodes))


# ------------------------------------------------------------------------------------ words


def _load_words(graph: TimedGraph, key: Row | str) -> str:
    if isinstance(key, Row):
        nodes = [node for node in graph.nodes if node.row == key and node.time]
        return f"{key.kind} {key.name!r}, always busy: {_names(node.task for node in nodes)}"
    what = f"the {key}" if key == LOCK else f"resource {key!r}"
    return f"{what}, always taken: {_names(graph.users[key])}"


def _names(tasks: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(tasks))


def _cycle_words(graph: TimedGraph, cycle: Cycle) -> str:
    rows = {graph.nodes[arc.tail].row for arc in cycle.arcs}
    if len(rows) == 1 and cycle.distance == 1:
        return _load_words(graph, rows.pop())
    nodes = graph.nodes
    steps, iteration = [], 0
    arcs = cycle.arcs
    first = min(range(len(arcs)), key=lambda k: (nodes[arcs[k].tail].stage, arcs[k].tail))
    for tail, head, _, lag in (*arcs[first:], *arcs[:first]):
        steps.append(_Step(tail, iteration))
        iteration += lag - nodes[head].stage + nodes[tail].stage
    return _path_words(graph, steps, iteration, cycle.ratio_us)


def _chain_words(found: _Found) -> str:
    """Back along what each turn waited for last, until it comes round."""
    playout, graph = found.playout, found.playout.graph
    size, nodes = len(graph.nodes), graph.nodes
    path: list[int] = []
    turn = playout.turn(graph.retire, found.last)
    met: dict[int, list[int]] = {}
    while turn >= 0:
        period, k = divmod(turn, size)
        for place in met.get(k, ()):
            periods = path[place] // size - period
            took_us = (playout.start[path[place]] - playout.start[turn]) / TICKS_PER_US
            if periods and abs(took_us - periods * found.ii_us) <= 1e-6 * took_us:
                round_trip = [*reversed(path[place + 1 :]), path[place]]
                steps = [
                    _Step(t % size, t // size - nodes[t % size].stage) for t in (turn, *round_trip)
                ]
                return _path_words(graph, steps[:-1], periods, found.ii_us, steps[0].iteration)
        met.setdefault(k, []).append(len(path))
        path.append(turn)
        turn = playout.bound_by[turn]
    return "tasks getting in each other's way, never twice in the same manner"


class _Step(NamedTuple):
    node: int
    iteration: int


def _path_words(
    graph: TimedGraph, steps: Sequence[_Step], distance: int, ratio_us: float, origin: int = 0
) -> str:
    """A cycle that begins and ends with the same task, ``distance`` iterations later."""
    words: list[str] = []
    for node, iteration in (*steps, _Step(steps[0].node, steps[0].iteration + distance)):
        number = iteration - origin
        word = f"{graph.nodes[node].task} {'i' if not number else f'i{number:+d}'}"
        if graph.device_of and graph.nodes[node].row.kind == "thread":
            word += " (host)"
        if graph.nodes[node].time or graph.nodes[node].task in OWN:
            words.append(word)
    return f"a cycle, {ratio_us / 1e3:.3f} ms per iteration: {' -> '.join(words)}"
