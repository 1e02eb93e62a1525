"""Which edges between the instructions of a period are implied by others, and need no wait."""

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
    """Consumer to its edges, less those that a path of no greater weight implies; lightest first.

    Paths lead through all other edges and ``fixed``. The graph has no cycle, so the result does not
    depend on what is dropped first. Edges of negative weight stay; no path leads through them.

    Args:
        edges: To be kept or dropped.
        fixed: What holds anyway.
        order: All places; hops of weight 0 lead from earlier ones to later ones.
        several: Places that are not in order with themselves, from one period to the next: what
            comes after one by some weight need not by a greater one. Edges between two stay.
    """
    always = set(fixed)
    kept = set(edges) - always
    waits: list[list[Hop]] = [[] for _ in order]
    if not kept:
        return waits
    lightest: list[dict[int, int]] = [{} for _ in order]
    for producer, consumer, weight in (*kept, *always):
        if 0 <= weight <= lightest[producer].get(consumer, weight):
            lightest[producer][consumer] = weight
    ordered = {hop for hop in kept if not {hop.producer, hop.consumer} <= several}
    lighter = {h for h in ordered if lightest[h.producer].get(h.consumer, h.weight) < h.weight}
    kept -= lighter
    kept -= _implied([hop for hop in ordered - lighter if hop.weight >= 0], lightest, order)
    for hop in sorted(kept, key=lambda hop: (hop.weight, hop.producer)):
        waits[hop.consumer].append(hop)
    return waits


def _implied(
    edges: Sequence[Hop], hops: Sequence[Mapping[int, int]], order: Sequence[int]
) -> set[Hop]:
    """The edges that two hops or more of no greater weight imply.

    Weight by weight, from the last place to the first, each place tells those before it what it
    reaches, and only where that has grown. It ends when every heavier edge is known to be implied.

    Args:
        edges: Of weight 0 or more.
        hops: Producer to consumer to weight.
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
            found = {h for h in leaving[place] if h.weight >= weight and beyond >> h.consumer & 1}
            undecided.subtract(hop.weight for hop in found - implied)
            implied |= found
        weight += 1
    return implied


class _Reach:
    """Which places each place reaches by paths of at most some weight.

    Attributes:
        beyond: Place to the set, in bits, of those that two hops or more lead to.
    """

    def __init__(self, hops: Sequence[Mapping[int, int]], order: Sequence[int]) -> None:
        self.beyond = [0] * len(order)
        self._reached = [1 << place for place in range(len(order))]  # by any number of hops
        self._order = order
        self._rank = {place: rank for rank, place in enumerate(order)}
        self._before: list[list[tuple[int, int]]] = [[] for _ in order]
        # Weight to place to what it then reaches: by one hop, and by more.
        self._next: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._news: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for producer, consumers in enumerate(hops):
            for consumer, weight in consumers.items():
                self._before[consumer].append((producer, weight))
                self._next[weight][producer] |= 1 << consumer

    def grown(self, weight: int) -> Iterator[int]:
        """The places whose ``beyond`` grows with this weight; it has to be asked for in turn."""
        direct = self._next.pop(weight, {})
        news = self._news[weight]
        places = [-self._rank[place] for place in {*direct, *news}]
        heapq.heapify(places)
        while places:
            place = self._order[-heapq.heappop(places)]
            told = news.pop(place, 0)
            reached = self._reached[place] | direct.get(place, 0) | told
            if reached != self._reached[place]:
                self._reached[place] = reached
                for producer, taken in self._before[place]:
                    into = self._news[weight + taken]
                    if not taken and producer not in into and producer not in direct:
                        heapq.heappush(places, -self._rank[producer])
                    into[producer] |= reached & ~(1 << place)
            if told & ~self.beyond[place]:
                self.beyond[place] |= told
                yield place
        del self._news[weight]
