"""Reduction of the edges between instructions: an edge implied by others needs no wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple


class Hop(NamedTuple):
    """An edge between two places in the order of a period; ``weight`` is a lag or a distance."""

    producer: int
    consumer: int
    weight: int


def reduce_edges(
    edges: Iterable[Hop],
    fixed: Iterable[Hop],
    order: Sequence[int],
    several: Set[int] = frozenset(),
) -> list[list[Hop]]:
    """Return each consumer's edges, lightest first, without those that a path of others implies.

    A path implies an edge if it has no greater weight. Paths lead through all other edges and
    ``fixed``. The graph has no cycle, so the result does not depend on the order of the removals.
    Edges of negative weight stay, and no path leads through them.

    Args:
        edges: The edges to keep or drop, between places in the order of a period.
        fixed: Edges that hold without a wait.
        order: All places; hops of weight 0 lead from earlier ones to later ones.
        several: Places whose turns are not ordered from one period to the next: an edge of some
            weight implies none of a greater weight there. Edges between two of them stay.
    """
    always = set(fixed)
    needed = set(edges) - always
    # Of parallel edges the lightest implies the others. It also stands for them in paths.
    hops: list[dict[int, int]] = [{} for _ in order]
    for producer, consumer, weight in (*needed, *always):
        if 0 <= weight <= hops[producer].get(consumer, weight):
            hops[producer][consumer] = weight
    # A path's weight may be less than the edge's only if one end runs in period order.
    ordered = [hop for hop in needed if not {hop.producer, hop.consumer} <= several]
    needed -= _implied([hop for hop in ordered if hop.weight >= 0], hops, order)
    waits: list[list[Hop]] = [[] for _ in order]
    for hop in sorted(needed, key=lambda hop: (hop.weight, hop.producer)):
        waits[hop.consumer].append(hop)
    return waits


def _implied(
    edges: Sequence[Hop], hops: Sequence[Mapping[int, int]], order: Sequence[int]
) -> set[Hop]:
    """Return the edges that a path of other hops and of no greater weight implies.

    Args:
        edges: Edges of weight 0 or more.
        hops: The weight of each edge, by producer and consumer.
        order: See ``reduce_edges``.
    """
    # reached[w][place]: the places to which paths of weight w or less lead from a place, itself
    # included. A bit for each, so that one operation on integers joins whole sets.
    reached: list[list[int]] = []
    for weight in range(max((hop.weight for hop in edges), default=-1) + 1):
        reached.append([1 << place for place in range(len(order))])
        # A hop of weight 0 leads to a later place of the order, whose set is complete by then.
        for place in reversed(order):
            for consumer, taken in hops[place].items():
                if taken <= weight:
                    reached[weight][place] |= reached[weight - taken][consumer]
    return {
        hop
        for hop in edges
        if any(
            taken <= hop.weight and reached[hop.weight - taken][place] >> hop.consumer & 1
            for place, taken in hops[hop.producer].items()
            if (place, taken) != (hop.consumer, hop.weight)
        )
    }
