"""The closure of dependences by paths over distances, for inferring the fewest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swpipe.core.effects import Conflict


class Edge(NamedTuple):
    """The order of a consumer on iteration i after a producer on iteration i - distance."""

    consumer: str
    producer: str
    distance: int


class Orders:
    """The closure of some dependences between tasks.

    A path from producer to consumer whose distances sum to n orders the consumer on iteration i
    after the producer on iteration i - n, and so after the producer on all earlier iterations:
    under every plan, each task comes after its own run on the previous iteration. An edge is
    implied by a path of no greater distance.

    Args:
        names: The tasks.
        edges: Dependences to begin with.
    """

    def __init__(self, names: Sequence[str], edges: Iterable[Edge] = ()) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        # Producer to consumer to the least distance of a path.
        self._least = {name: dict.fromkeys(names, math.inf) | {name: 0} for name in names}
        for edge in edges:
            self.add(edge)

    def add(self, edge: Edge) -> None:
        """Add one dependence, and everything that follows from it and the earlier ones."""
        if not self.implies(edge):
            after = [*self._least[edge.consumer].items()]
            for least in self._least.values():
                here = least[edge.producer] + edge.distance
                for name, distance in after:
                    least[name] = min(least[name], here + distance)

    def implies(self, edge: Edge) -> bool:
        """Return whether the order that an edge requires is kept."""
        return self._least[edge.producer][edge.consumer] <= edge.distance

    def missing(self, edges: Iterable[Edge]) -> list[Edge]:
        """Add the fewest of these edges that make the rest implied, and return the added ones.

        The edges are of distance 0, all along the order of names, or of distance 1.
        """
        added = []
        # Every edge comes after all edges that could imply it: a path within an iteration consists
        # of shorter steps, and a path across iterations has an edge whose producer is no earlier
        # and whose consumer is no later. One pass is therefore enough.
        for edge in sorted(edges, key=self._rank):
            if not self.implies(edge):
                self.add(edge)
                added.append(edge)
        return added

    def _rank(self, edge: Edge) -> tuple[int, int, int]:
        """Return the sort key of an edge: shorter edges first."""
        consumer = self._index[edge.consumer]
        producer = self._index[edge.producer]
        return edge.distance, consumer - producer, consumer


def edge_of(conflict: Conflict) -> Edge:
    """Return the order that a conflict requires."""
    return Edge(conflict.consumer, conflict.producer, conflict.distance)
