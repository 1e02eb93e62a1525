"""Reduction of the edges between instructions: an edge implied by others needs no wait."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
    waits: list[list[Hop]] = [[] for _ in order]
    if not needed:
        return waits
    # Of parallel edges the lightest implies the others. It also stands for them in paths.
    lightest: list[dict[int, int]] = [{} for _ in order]
    for producer, consumer, weight in (*needed, *always):
        if 0 <= weight <= lightest[producer].get(consumer, weight):
            lightest[producer][consumer] = weight
    # A path's weight may be less than the edge's only if one end runs in period order.
    ordered = {hop for hop in needed if not {hop.producer, hop.consumer} <= several}
    lighter = {h for h in ordered if lightest[h.producer].get(h.consumer, h.weight) < h.weight}
    needed -= lighter
    needed -= _implied([hop for hop in ordered - lighter if hop.weight >= 0], lightest, order)
    for hop in sorted(needed, key=lambda hop: (hop.weight, hop.producer)):
        waits[hop.consumer].append(hop)
    return waits


def _implied(
    edges: Sequence[Hop], hops: Sequence[Mapping[int, int]], order: Sequence[int]
) -> set[Hop]:
    """Return the edges that paths of two hops or more and of no greater weight imply.

    For each weight in ascending order, and from the last place to the first, each place propagates
    the set of places that it reaches to the places before it, if the set has grown. The search ends
    when every heavier edge is known to be implied.

    Args:
        edges: Edges of weight 0 or more.
        hops: The weight of each edge, by producer and consumer.
        order: As for ``reduce_edges``.
    """
    reach = _Reach(hops, order)
    leaving: dict[int, list[Hop]] = defaultdict(list)
    for hop in edges:
        leaving[hop.producer].append(hop)
    undecided = Counter(hop.weight for hop in edges)
    implied: set[Hop] = set()
    weight = 0
    while +undecided and weight <= max(+undecided):
        for place in reach.grown(weight):
            beyond = reach.beyond[place]
            # ``beyond`` holds a bit per place, so a whole set is merged or tested by one operation
            # on integers.
            implied_here = {
                h for h in leaving[place] if h.weight >= weight and beyond >> h.consumer & 1
            }
            undecided.subtract(hop.weight for hop in implied_here - implied)
            implied |= implied_here
        weight += 1
    return implied


class _Reach:
    """The set of places that each place reaches by paths of at most some weight.

    Attributes:
        beyond: For each place, the places that paths of two hops or more lead to, as bits.
    """

    def __init__(self, hops: Sequence[Mapping[int, int]], order: Sequence[int]) -> None:
        self.beyond = [0] * len(order)
        # The places that each place reaches by any number of hops, itself included, as bits.
        self._reached = [1 << place for place in range(len(order))]
        self._order = order
        self._rank = {place: rank for rank, place in enumerate(order)}
        self._before: list[list[tuple[int, int]]] = [[] for _ in order]
        # For each weight and place, the places that it reaches from that weight on: by one hop
        # (``_next``), and by more (``_news``).
        self._next: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._news: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for producer, consumers in enumerate(hops):
            for consumer, weight in consumers.items():
                self._before[consumer].append((producer, weight))
                self._next[weight][producer] |= 1 << consumer

    def grown(self, weight: int) -> Iterator[int]:
        """Yield the places whose ``beyond`` grows with this weight.

        Ask for weights in ascending order.
        """
        direct = self._next.pop(weight, {})
        news = self._news[weight]
        places = [-self._rank[place] for place in {*direct, *news}]
        heapq.heapify(places)
        while places:
            place = self._order[-heapq.heappop(places)]
            arriving = news.pop(place, 0)
            reached = self._reached[place] | direct.get(place, 0) | arriving
            if reached != self._reached[place]:
                self._reached[place] = reached
                for producer, taken in self._before[place]:
                    into = self._news[weight + taken]
                    # A hop of weight 0 adds to the current weight: the producer comes earlier in
                    # the order, so it is still to be visited.
                    if not taken and producer not in into and producer not in direct:
                        heapq.heappush(places, -self._rank[producer])
                    into[producer] |= reached & ~(1 << place)
            if arriving & ~self.beyond[place]:
                self.beyond[place] |= arriving
                yield place
        del self._news[weight]
