"""The maximum cycle ratio: known graphs, and all cycles of random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import pytest

from swpipe.planning.simulation.cycles import (
    TICKS_PER_US,
    Arc,
    ArcCycle,
    heaviest_cycle,
    ticks,
)


def all_cycles(nodes: int, arcs: Sequence[Arc]) -> Iterator[list[Arc]]:
    """Yield every simple cycle, from its least node on."""

    def walk(path: list[Arc], begin: int) -> Iterator[list[Arc]]:
        for arc in arcs:
            if arc.tail != path[-1].head or arc.head < begin:
                continue
            if arc.head == begin:
                yield [*path, arc]
            elif all(arc.head != step.tail for step in path):
                yield from walk([*path, arc], begin)

    for arc in arcs:
        if arc.head == arc.tail:
            yield [arc]
        elif arc.head > arc.tail:
            yield from walk([arc], arc.tail)


def random_graph(rng: random.Random, nodes: int) -> list[Arc]:
    """Return arcs; forward ones may have distances below 0, which backward ones compensate."""
    arcs = []
    for _ in range(3 * nodes):
        tail, head = rng.randrange(nodes), rng.randrange(nodes)
        distance = rng.randint(-1, 2) if tail < head else rng.randint(nodes, nodes + 2)
        arcs.append(Arc(tail, head, rng.randint(0, 50), distance))
    return arcs


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_greatest_ratio_of_all_cycles(seed: int) -> None:
    """It is exact: a fraction."""
    rng = random.Random(seed)
    nodes = rng.randint(1, 6)
    arcs = random_graph(rng, nodes)
    ratios = [
        Fraction(sum(a.time for a in cycle), sum(a.distance for a in cycle))
        for cycle in all_cycles(nodes, arcs)
    ]
    found = heaviest_cycle(nodes, arcs)
    if found:  # each arc starts where the one before it ends
        assert all(a.head == b.tail for a, b in pairwise((*found.arcs, found.arcs[0])))
        assert set(found.arcs) <= set(arcs)
    assert max(ratios, default=0) == (Fraction(found.time, found.distance) if found else 0)


def test_without_a_cycle_nothing_limits() -> None:
    """A chain does not limit the interval, nor does a cycle that takes no time."""
    assert heaviest_cycle(3, [Arc(0, 1, 5, 0), Arc(1, 2, 5, 1)]) is None
    assert heaviest_cycle(2, [Arc(0, 1, 0, 0), Arc(1, 0, 0, 1)]) is None


def test_the_search_can_start_above_some_cycles() -> None:
    """It finds the same cycle from below its ratio, and none from its ratio on."""
    light, heavy = Arc(0, 0, 3, 1), Arc(1, 1, 5, 1)
    for above in (2, 3, 4):
        found = heaviest_cycle(2, [light, heavy], above=above)
        assert found is not None
        assert found.arcs == (heavy,)
    assert heaviest_cycle(2, [light, heavy], above=5) is None


def test_ticks_add_up_exactly() -> None:
    """Ten times 0.1 is 1."""
    assert 10 * ticks(0.1) == ticks(1.0) == TICKS_PER_US


def test_a_cycle_without_a_distance_allows_no_interval() -> None:
    """Limits without a plan have such a bound; it is no division by zero."""
    assert ArcCycle((Arc(0, 1, 5, 1), Arc(1, 0, 5, -1))).ratio_us == math.inf
