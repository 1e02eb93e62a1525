"""What sets an interval, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swpipe._engine.program import ADMIT
from swpipe.planning.simulation.cycles import TICKS_PER_US, Cycle, heaviest_cycle
from swpipe.planning.simulation.playout import Playout, play
from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph
from swpipe.trace.span import OWN, Row

RUNS = (3, 16)
"""Times the graph's reach, in iterations: so many are looked at, and more if need be."""


def cause(graph: TimedGraph, ii_us: float) -> str:
    """What sets the interval: what is taken all the time, or a cycle of turns.

    Args:
        graph: Of a program.
        ii_us: Its interval, as ``interval_of`` tells it.
    """
    cycle = heaviest_cycle(len(graph.nodes), graph.arcs)
    least_us = cycle.ratio_us if cycle is not None else 0.0
    if not graph.contended:
        return "nothing" if cycle is None else _cycle_words(graph, cycle)
    key, load = max(graph.load.items(), key=lambda item: item[1])
    if ii_us <= load / TICKS_PER_US:
        return _load_words(graph, key)
    if cycle is not None and ii_us <= least_us:
        return _cycle_words(graph, cycle)
    for length in RUNS:
        words = _chain_words(play(graph, length * graph.reach), ii_us)
        if words is not None:
            return words
    return "tasks getting in each other's way, never twice in the same manner"


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


def _chain_words(playout: Playout, ii_us: float) -> str | None:
    """Back along what each turn waited for last, until it comes round; None where it never does."""
    graph = playout.graph
    size, nodes = len(graph.nodes), graph.nodes
    path: list[int] = []
    turn = playout.turn(graph.retire, _untouched(playout))
    met: dict[int, list[int]] = {}
    while turn >= 0:
        period, k = divmod(turn, size)
        for place in met.get(k, ()):
            periods = path[place] // size - period
            took_us = (playout.start[path[place]] - playout.start[turn]) / TICKS_PER_US
            if periods and abs(took_us - periods * ii_us) <= 1e-6 * took_us:
                round_trip = [*reversed(path[place + 1 :]), path[place]]
                steps = [
                    _Step(t % size, t // size - nodes[t % size].stage) for t in (turn, *round_trip)
                ]
                return _path_words(graph, steps[:-1], periods, ii_us, steps[0].iteration)
        met.setdefault(k, []).append(len(path))
        path.append(turn)
        turn = playout.bound_by[turn]
    return None


def _untouched(playout: Playout) -> int:
    """The last iteration that was done before the first missing one could have been admitted."""
    graph, missing = playout.graph, playout.iterations
    admit = next(k for k, node in enumerate(graph.nodes) if node.task == ADMIT)
    turn = playout.turn(admit, missing)
    if turn >= len(playout.end):
        return missing - 1
    return max(i for i in range(missing) if i == 0 or playout.retired(i) <= playout.end[turn])


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
