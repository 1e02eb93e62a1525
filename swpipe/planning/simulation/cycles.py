"""The maximum cycle ratio of a graph: the heaviest cycle for the distance that it spans.

Every arc says "the head's turn comes ``time`` after the tail's turn of ``distance`` turns before".
Around a cycle that adds up to a turn that comes ``time`` after the one ``distance`` turns before:
no schedule repeats faster than every time / distance, and the worst of all cycles is reached.

The worst is found by Lawler's test in Dinkelbach's iteration: is there a cycle of positive weight
when each arc weighs time - ratio x distance? Where there is (Bellman and Ford), its own ratio is
the next to test; where there is none, the last one is the maximum. Times are whole ticks and all
arithmetic is on integers, so the result is exact.

Sources: E. Lawler, "Combinatorial Optimization" (1976), chapter 3.13; W. Dinkelbach, "On nonlinear
fractional programming" (1967); A. Dasdan, "Experimental analysis of the fastest optimum cycle
ratio and mean algorithms" (2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TICKS_PER_US = 10**9
"""Times are rounded to this and counted in whole ticks: sums are exact, and equal times equal."""


def ticks(us: float) -> int:
    """Microseconds as whole ticks."""
    return round(us * TICKS_PER_US)


class Arc(NamedTuple):
    """The head's turn p begins no sooner than ``time`` after the tail's turn p - distance does.

    Attributes:
        tail: A node's number, from 0.
        head: A node's number.
        time: Ticks; not negative.
        distance: Turns. May be negative; around each cycle the sum is positive.
    """

    tail: int
    head: int
    time: int
    distance: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """Arcs, each beginning where the one before it ends; the last leads back to the first."""

    arcs: tuple[Arc, ...]

    @property
    def time(self) -> int:
        """Ticks, all around."""
        return sum(arc.time for arc in self.arcs)

    @property
    def distance(self) -> int:
        """Turns, all around."""
        return sum(arc.distance for arc in self.arcs)

    @property
    def ratio_us(self) -> float:
        """Microseconds per turn."""
        return self.time / self.distance / TICKS_PER_US


def heaviest_cycle(nodes: int, arcs: Sequence[Arc], above: int = 0) -> Cycle | None:
    """The cycle with the most time per distance; None where no cycle takes more than ``above``.

    Args:
        nodes: How many there are.
        arcs: Sorted along the arcs of distance 0 it goes fastest. Every cycle has a positive
            distance.
        above: Ticks per turn. The search begins there, and is short where that is near.
    """
    best: Cycle | None = None
    time, distance = above, 1
    while (heavier := _positive_cycle(nodes, arcs, time, distance)) is not None:
        best, time, distance = heavier, heavier.time, heavier.distance
    return best


def _positive_cycle(nodes: int, arcs: Sequence[Arc], time: int, distance: int) -> Cycle | None:
    """A cycle whose ratio is above time / distance."""
    weights = [(a.tail, a.head, a.time * distance - time * a.distance, a) for a in arcs]
    longest = [0] * nodes
    into: list[Arc | None] = [None] * nodes
    while True:
        changed = False
        for tail, head, weight, arc in weights:
            length = longest[tail] + weight
            if length > longest[head]:
                longest[head] = length
                into[head] = arc
                changed = True
        if not changed:
            return None
        if (found := _cycle_in(into)) is not None:
            return found


def _cycle_in(into: Sequence[Arc | None]) -> Cycle | None:
    """A cycle along the last arcs of longest paths: it exists once a cycle is positive."""
    seen_from = [-1] * len(into)
    for begin in range(len(into)):
        node = begin
        while seen_from[node] < 0 and (arc := into[node]) is not None:
            seen_from[node] = begin
            node = arc.tail
        if seen_from[node] == begin and into[node] is not None:
            return _around(into, node)
    return None


def _around(into: Sequence[Arc | None], node: int) -> Cycle:
    arcs: list[Arc] = []
    at = node
    while (arc := into[at]) is not None:
        arcs.append(arc)
        at = arc.tail
        if at == node:
            break
    return Cycle(tuple(reversed(arcs)))
