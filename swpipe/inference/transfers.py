"""Memory that passes from one task to another without an attribute or a state showing it.

A task that uses memory which another task of the iteration created comes after it. Usually it has
read an attribute or a state to get there, and the order is known. Memory can also pass inside an
object that is not inspected, or along autograd's graph::

    forward    ctx.seam = seam          seam holds a leaf
    backward   ctx.loss.backward()      adds a gradient to the leaf, which no attribute shows
    go on      ctx.seam.leaf.grad       reads ctx.seam, which no task has written since

So the recorded operators are checked once more: if two tasks of an iteration access the same memory
and one of them creates or writes it, the later task comes after the earlier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.inference.observation import IterationObservation
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.storages import StorageId, Storages


class Transfer(NamedTuple):
    """The consumer uses memory from the producer of the same iteration.

    Attributes:
        description: Data type and shape of some of it.
    """

    consumer: str
    producer: str
    description: str

    @property
    def place(self) -> Location:
        """The memory, as something that both tasks access."""
        return Location(f"memory from {self.producer!r} to {self.consumer!r}", False)


def find_transfers(
    iterations: Iterable[IterationObservation], effects: EffectTable, storages: Storages
) -> tuple[Transfer, ...]:
    """The fewest transfers that order what the effects do not order yet."""
    descriptions: dict[Edge, str] = {}
    for iteration in iterations:
        for edge, number in _shared(iteration):
            descriptions.setdefault(edge, storages.description(number))
    known = Orders(tuple(effects), map(edge_of, conflicts(effects)))
    missing = known.missing(descriptions)
    return tuple(Transfer(edge.consumer, edge.producer, descriptions[edge]) for edge in missing)


def add_transfers(effects: EffectTable, transfers: Iterable[Transfer]) -> dict[str, Effects]:
    """The effects, with transfers as additional reads and writes."""
    table = dict(effects)
    for one in transfers:
        place = frozenset({one.place})
        table[one.producer] |= Effects(writes=place)
        table[one.consumer] |= Effects(reads=place)
    return table


def _shared(iteration: IterationObservation) -> Iterator[tuple[Edge, StorageId]]:
    """Each pair of tasks that access the same storage, one of them creating or writing it."""
    # Storage to its users, in serial order, and whether they write it.
    users: dict[StorageId, dict[str, bool]] = defaultdict(dict)
    for observed in iteration.tasks:
        written = observed.operators.created | observed.operators.writes
        for number in observed.operators.all_reads | written:
            users[number][observed.task] = number in written
    for number, writes in users.items():
        for producer, consumer in combinations(writes, 2):
            if writes[producer] or writes[consumer]:
                yield Edge(consumer, producer, 0), number
