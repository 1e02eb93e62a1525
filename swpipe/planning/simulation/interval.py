"""The steady-state interval of a timed graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from swpipe.planning.simulation.causes import cause
from swpipe.planning.simulation.cycles import TICKS_PER_US, heaviest_cycle
from swpipe.planning.simulation.playout import ENDLESS, Player
from swpipe.planning.simulation.timed_graph import TimedGraph

LONGEST_RUN = 16
"""Times the graph's reach, in iterations: then a repetition is given up."""

LONGEST_PATTERN = 12
"""Iterations in the longest repetition that is looked for."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How fast the steady state goes.

    Attributes:
        ii_us: From one iteration to the next, in microseconds.
        exact: Whether that is exact, or a mean.
        graph: Of what.
    """

    ii_us: float
    exact: bool
    graph: TimedGraph = field(repr=False)

    @property
    def limit(self) -> str:
        """What sets it, in words; found when asked for, since it takes a while."""
        return cause(self.graph, self.ii_us)


def interval_of(graph: TimedGraph, enough_us: float = math.inf) -> Interval:
    """The interval of a program's graph.

    Args:
        graph: The graph.
        enough_us: To those who compare, an interval of this or more is as good as any other: where
            a bound shows that it is, the bound stands for it, and nothing is played.
    """
    taken = max(graph.load.values())
    cycle = heaviest_cycle(len(graph.nodes), graph.arcs, above=taken)
    bound_us = taken / TICKS_PER_US if cycle is None else cycle.ratio_us
    if not graph.contended or bound_us >= enough_us:
        return Interval(bound_us, True, graph)
    pace = _pace(graph)
    return Interval(max(pace.ii_us, bound_us), pace.exact, graph)


class _Pace(NamedTuple):
    ii_us: float
    exact: bool


def _pace(graph: TimedGraph) -> _Pace:
    """The interval of a run that repeats itself tick for tick, or the mean of a long one."""
    run = Player(graph, ENDLESS)
    size, memory = run.size, _memory(graph)
    turns = [node.stage * size + k for k, node in enumerate(graph.nodes)]
    retired: list[int] = []
    shapes: list[tuple[int, ...]] = []
    # Pattern to iterations in a row that look like the one so many before.
    alike = [0] * (LONGEST_PATTERN + 1)
    for i in range(LONGEST_RUN * graph.reach):
        retired.append(run.retired(i))
        # All that the iteration did, seen from its end; and from the end of the one before.
        done, end, at = retired[i], run.end, i * size
        shape = (done - retired[i - 1], *[end[at + turn] - done for turn in turns])
        shapes.append(shape)
        for pattern in range(1, min(i, LONGEST_PATTERN) + 1):
            alike[pattern] = alike[pattern] + 1 if shapes[i - pattern] == shape else 0
            if alike[pattern] == memory:
                return _Pace((done - retired[i - pattern]) / pattern / TICKS_PER_US, True)
    half = len(retired) // 2
    taken = retired[-1] - retired[half]
    return _Pace(taken / (len(retired) - 1 - half) / TICKS_PER_US, False)


def _memory(graph: TimedGraph) -> int:
    """How many iterations, one after the other, decide all that comes after them.

    When the first of ``depth`` + 1 iterations is done, so are all before it, and no more than those
    after it are in flight. How these go on is seen in their own shapes; of what was done before,
    nothing is felt any more but a hand-over, as far back as one reaches.
    """
    nodes = graph.nodes
    back = (
        lag - nodes[head].stage + nodes[tail].stage
        for tail, head, time, lag in graph.arcs
        if time > nodes[tail].time
    )
    return graph.depth + max([1, *back])
