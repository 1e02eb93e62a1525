"""Memory that one task hands to another where no attribute tells of it.

Whoever uses what another task of the iteration made, comes after it. As a rule an attribute was
set and read on the way, or a state was, and the order of the two is known. Memory may take other
ways, though: inside an object that is not looked into, or along autograd's graph::

    forward    ctx.seam = seam          seam holds a leaf
    backward   ctx.loss.backward()      leaves a gradient in the leaf: no attribute leads there
    go on      ctx.seam.leaf.grad       reads ctx.seam, which nobody has written since

So the operators are asked once more: of two tasks that touched the same memory in an iteration, one
of which made or wrote it, the later comes after the sooner, unless that follows anyhow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.inference.facts import IterationFacts
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.storages import StorageId, Storages


class Handed(NamedTuple):
    """One task comes after another of its iteration, for the sake of what that one left.

    Attributes:
        looks: Data type and shape of some of it.
    """

    consumer: str
    producer: str
    looks: str

    @property
    def place(self) -> Location:
        """It, as something that both touch."""
        return Location(f"memory from {self.producer!r} to {self.consumer!r}", False)


def handed_over(
    iterations: Iterable[IterationFacts], effects: EffectTable, storages: Storages
) -> tuple[Handed, ...]:
    """The fewest orders that memory asks for beside those that effects ask for."""
    looks: dict[Edge, str] = {}
    for iteration in iterations:
        for edge, number in _shared(iteration):
            looks.setdefault(edge, storages.looks(number))
    known = Orders(tuple(effects), map(edge_of, conflicts(effects)))
    return tuple(Handed(edge.consumer, edge.producer, looks[edge]) for edge in known.missing(looks))


def with_handed(effects: EffectTable, handed: Iterable[Handed]) -> dict[str, Effects]:
    """The effects, and what is handed over."""
    table = dict(effects)
    for one in handed:
        place = frozenset({one.place})
        table[one.producer] |= Effects(writes=place)
        table[one.consumer] |= Effects(reads=place)
    return table


def _shared(iteration: IterationFacts) -> Iterator[tuple[Edge, StorageId]]:
    """Each two tasks that touch the same memory, one of them to change it."""
    for number, users in _users(iteration).items():
        names = list(users)
        for later, consumer in enumerate(names):
            for producer in names[:later]:
                if users[producer] or users[consumer]:
                    yield Edge(consumer, producer, 0), number


def _users(iteration: IterationFacts) -> Mapping[StorageId, dict[str, bool]]:
    """Storage to who touched it, in serial order, and whether to change it."""
    found: dict[StorageId, dict[str, bool]] = defaultdict(dict)
    for facts in iteration.tasks:
        changed = facts.made | facts.written
        for number in facts.read | changed:
            found[number][facts.task] = number in changed
    return found
