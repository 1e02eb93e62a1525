"""The maximum cycle ratio of a graph, which is the time over distance of its heaviest cycle.

An arc says that the head in period p starts at least ``time`` after the tail in period
p - ``distance`` starts. So around a cycle a node repeats no faster than every time / distance, and
the interval of the whole graph is the greatest of these ratios.

The ratio is computed by Dinkelbach's iteration with Lawler's test: is there a cycle of positive
weight, if each arc weighs time - ratio x distance? If so (Bellman-Ford finds the cycle), the ratio
of that cycle is tested next; if not, the last ratio is the maximum. Times are integers, so the
result is exact.

Sources: E. Lawler, "Combinatorial Optimization" (1976), chapter 3.13; W. Dinkelbach, "On nonlinear
fractional programming" (1967); A. Dasdan, "Experimental analysis of the fastest optimum cycle
ratio and mean algorithms" (2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.errors import PlanError, Problem

MOST_STEPS = 10**7
"""The largest number of arcs that are followed in the search for one cycle; a few seconds."""

TICKS_PER_US = 10**9
"""The number of ticks per microsecond; times are rounded to ticks, so that sums are exact."""


def ticks(us: float) -> int:
    """Return a time in microseconds as a number of ticks."""
    return round(us * TICKS_PER_US)


class Arc(NamedTuple):
    """A constraint: the head in period p starts ``time`` or more after the tail in p - distance.

    Attributes:
        tail: The number of a node, from 0.
        head: The number of a node.
        time: The time in ticks; not negative.
        distance: The number of periods. It can be negative; the sum around each cycle is positive.
    """

    tail: int
    head: int
    time: int
    distance: int


@dataclass(frozen=True, slots=True)
class ArcCycle:
    """A cycle of arcs: each arc begins where the one before it ends."""

    arcs: tuple[Arc, ...]

    @property
    def time(self) -> int:
        """The sum of the times, in ticks."""
        return sum(arc.time for arc in self.arcs)

    @property
    def distance(self) -> int:
        """The sum of the distances, in periods."""
        return sum(arc.distance for arc in self.arcs)

    @property
    def ratio_us(self) -> float:
        """The time per distance, in microseconds per period.

        It is infinite if the distance is 0 or negative: no interval is long enough.
        """
        if self.distance <= 0:
            return math.inf
        return self.time / self.distance / TICKS_PER_US


def in_words(steps: Iterable[tuple[str, int]]) -> str:
    """Return the steps of a cycle in words, such as "read i -> train i -> read i+1".

    Args:
        steps: A name and the number of iterations to the next step. Steps without a name, and those
            with the name of the step before on the same iteration, are left out.
    """
    words: list[str] = []
    iteration = 0
    for name, distance in steps:
        word = f"{name} i{iteration:+d}" if iteration else f"{name} i"
        if name and word not in words[-1:]:
            words.append(word)
        iteration += distance
    return " -> ".join(words)


def heaviest_cycle(nodes: int, arcs: Sequence[Arc], above: int = 0) -> ArcCycle | None:
    """Return the cycle with the most time per distance; None if no cycle exceeds ``above``.

    Args:
        nodes: The number of nodes.
        arcs: The arcs. Every cycle must have a positive distance. The search is fastest if the arcs
            are sorted along those of distance 0.
        above: The ratio, in ticks per period, at which the search starts; the search is short if it
            is near the result.

    Raises:
        PlanError: The search takes more than ``MOST_STEPS``.
    """
    best: ArcCycle | None = None
    time = above
    distance = 1
    # Dinkelbach: each round finds a cycle of a greater ratio, so the loop ends at the maximum.
    while (heavier := _positive_cycle(nodes, arcs, time, distance)) is not None:
        best = heavier
        time = heavier.time
        distance = heavier.distance
    return best


def _positive_cycle(nodes: int, arcs: Sequence[Arc], time: int, distance: int) -> ArcCycle | None:
    """Return a cycle whose ratio is above time / distance, or None."""
    # The test ``a.time / a.distance > time / distance``, multiplied out: integers stay exact.
    weights = [(a.tail, a.head, a.time * distance - time * a.distance, a) for a in arcs]
    longest = [0] * nodes
    into: list[Arc | None] = [None] * nodes
    # Bellman-Ford from all nodes at once: every node starts with length 0.
    for _ in range(MOST_STEPS // (len(arcs) + 1)):
        changed = False
        for tail, head, weight, arc in weights:
            length = longest[tail] + weight
            if length > longest[head]:
                longest[head] = length
                into[head] = arc
                changed = True
        if not changed:
            return None
        # Look for a cycle after each round instead of after all: it is usually there soon.
        if (cycle := _cycle_in(into)) is not None:
            return cycle
    rule = "use fewer tasks, or fewer dependences between iterations"
    raise PlanError([Problem(f"cycles of {nodes} steps take too long to search: {rule}")])


def _cycle_in(into: Sequence[Arc | None]) -> ArcCycle | None:
    """Return a cycle along the last arcs of the longest paths, if there is one."""
    seen_from = [-1] * len(into)
    for begin in range(len(into)):
        node = begin
        # Each node is followed once, because walks stop at nodes that an earlier walk has seen.
        while seen_from[node] < 0 and (arc := into[node]) is not None:
            seen_from[node] = begin
            node = arc.tail
        if seen_from[node] == begin and into[node] is not None:
            return _around(into, node)
    return None


def _around(into: Sequence[Arc | None], node: int) -> ArcCycle:
    arcs: list[Arc] = []
    # The arcs lead backwards, from head to tail, so the list is reversed in the end.
    at = node
    while (arc := into[at]) is not None and not (arcs and at == node):
        arcs.append(arc)
        at = arc.tail
    return ArcCycle(tuple(reversed(arcs)))
