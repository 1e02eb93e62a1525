"""Which of some dependences imply others, by paths over distances: to infer the fewest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from swpipe.core.effects import Conflict


class Edge(NamedTuple):
    """The consumer on iteration i comes after the producer on iteration i - distance."""

    consumer: str
    producer: str
    distance: int


class Orders:
    """The closure of some dependences between tasks.

    A path from producer to consumer whose distances sum to n orders the consumer on iteration i
    after the producer on iteration i - n, and so after those before: every task comes after itself
    of the iteration before, under every plan. An edge is implied by a path of no greater distance.

    Args:
        names: The tasks.
        edges: Dependences to begin with.
    """

    def __init__(self, names: Sequence[str], edges: Iterable[Edge] = ()) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._least = torch.full((len(names), len(names)), torch.inf)  # [producer, consumer]
        self._least.fill_diagonal_(0)
        self._rows: list[list[float]] = self._least.tolist()  # the same, quick to look things up in
        for edge in edges:
            self.add(edge)

    def add(self, edge: Edge) -> None:
        """Add one dependence, and all that follows from it and those before."""
        if not self.implies(edge):
            least = self._least
            consumer, producer = self._index[edge.consumer], self._index[edge.producer]
            through = least[:, producer, None] + edge.distance + least[consumer, None, :]
            torch.minimum(least, through, out=least)
            self._rows = least.tolist()

    def implies(self, edge: Edge) -> bool:
        """Whether the order that an edge asks for is kept."""
        return self._rows[self._index[edge.producer]][self._index[edge.consumer]] <= edge.distance

    def missing(self, edges: Iterable[Edge]) -> list[Edge]:
        """The fewest of these edges that, added, make the others implied; adds them.

        The edges are of distance 0, all along the order of names, or of distance 1.
        """
        added = []
        # A path within an iteration is made of shorter steps; one across goes from no sooner a
        # producer to no later a consumer. So what might imply an edge stands before it here.
        for edge in sorted(edges, key=self._rank):
            if not self.implies(edge):
                self.add(edge)
                added.append(edge)
        return added

    def _rank(self, edge: Edge) -> tuple[int, int, int]:
        consumer, producer = self._index[edge.consumer], self._index[edge.producer]
        return edge.distance, consumer - producer, consumer


def edge_of(conflict: Conflict) -> Edge:
    """The order that a conflict asks for."""
    return Edge(conflict.consumer, conflict.producer, conflict.distance)
