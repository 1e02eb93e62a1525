"""What tasks touch, and which of them must therefore keep their serial order.

A *place* is something that tasks read and write: an attribute of the context, of which every
iteration has its own, or a state that persistent the iteration. Two tasks *conflict* over a place
when both touch it and one of them writes it. A serial run orders all conflicts; a plan that orders
them in the same way gives the same numbers.

For a conflict over an attribute the two are on one iteration: distance 0. Over a state it is
enough to order each pair within an iteration (distance 0, in serial order) and from one iteration
to the next (distance 1, each pair either way round, and each writer after itself): whatever lies
further apart follows from those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.task import PipelineTask


class Location(NamedTuple):
    """Something that tasks read and write.

    Attributes:
        name: Of the attribute, or of the state; or in a few words, of memory without a name.
        persistent: True for a state, which persistent the iteration; False for an attribute.
    """

    name: str
    persistent: bool

    def __str__(self) -> str:
        if self.persistent:
            return f"state {self.name!r}"
        return f"ctx.{self.name}" if self.name.isidentifier() else self.name


@dataclass(frozen=True, slots=True)
class Effects:
    """What one task touches in one iteration.

    Attributes:
        reads: Places whose content it may use.
        writes: Places that it may set, delete or modify in place.
    """

    reads: frozenset[Location] = frozenset()
    writes: frozenset[Location] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)


EffectTable: TypeAlias = Mapping[str, Effects]
"""Task name to its effects, in serial order."""

Hazard: TypeAlias = Literal["read after write", "write after read", "write after write"]


class Conflict(NamedTuple):
    """The consumer on iteration i must come after the producer on iteration i - distance.

    Attributes:
        distance: 0 or 1.
        place: What both touch.
        hazard: What the order protects.
    """

    consumer: str
    producer: str
    distance: int
    place: Location
    hazard: Hazard


def declared_effects(tasks: Iterable[PipelineTask]) -> dict[str, Effects]:
    """What the tasks' ``DeclaredIO`` say that they touch."""
    return {
        task.name: Effects(
            frozenset(Location(io.state, True) for io in task.io if io.state and "r" in io.mode),
            frozenset(Location(io.state, True) for io in task.io if io.state and "w" in io.mode),
        )
        for task in tasks
    }


def conflicts(effects: EffectTable) -> Iterator[Conflict]:
    """Every conflict between tasks; ``effects`` is in serial order. One hazard for each pair."""
    names = tuple(effects)
    for later, consumer in enumerate(names):
        for sooner, producer in enumerate(names):
            if sooner < later:
                yield from _between(effects, consumer, producer, 0)
            # With itself, too: a writer comes after itself of the iteration before.
            yield from _between(effects, consumer, producer, 1)


def _between(
    effects: EffectTable, consumer: str, producer: str, distance: int
) -> Iterator[Conflict]:
    after, before = effects[consumer], effects[producer]
    shared = (after.reads | after.writes) & (before.reads | before.writes)
    for place in sorted(shared):
        hazard = _hazard(place in before.writes, place in after.reads, place in after.writes)
        if hazard is not None and (place.persistent or distance == 0):
            yield Conflict(consumer, producer, distance, place, hazard)


def _hazard(written: bool, read_after: bool, written_after: bool) -> Hazard | None:
    if written and read_after:
        return "read after write"
    if written and written_after:
        return "write after write"
    return "write after read" if written_after else None
