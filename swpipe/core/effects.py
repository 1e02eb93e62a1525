"""What tasks touch, and which of them must therefore keep their serial order.

A *location* is something that tasks read and write: an attribute of the context, of which every
iteration has its own, or a state that persists from one iteration to the next. Two tasks *conflict*
over a location when both touch it and one of them writes it. A serial run orders all conflicts; a
plan that orders them in the same way gives the same numbers.

For a conflict over an attribute the two are on one iteration: distance 0. Over a state it is
enough to order each pair within an iteration (distance 0, in serial order) and from one iteration
to the next (distance 1, each pair either way round, and each writer after itself): whatever lies
further apart follows from those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.task import PipelineTask


class Location(NamedTuple):
    """Something that tasks read and write.

    Attributes:
        name: Of the attribute, or of the state; or in a few words, of memory without a name.
        persistent: True for a state, which persists between iterations; False for an attribute.
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


def conflicts(effects: EffectTable) -> list[Conflict]:
    """Every conflict between tasks, by consumer; ``effects`` is in serial order.

    One hazard for each pair, distance and place.
    """
    users: dict[Location, list[str]] = defaultdict(list)
    for name, touched in effects.items():
        for place in touched.reads | touched.writes:
            users[place].append(name)
    serial = {name: number for number, name in enumerate(effects)}
    found = [c for place, names in users.items() for c in _over(place, names, effects)]
    return sorted(found, key=lambda c: (serial[c.consumer], serial[c.producer], *c[2:4]))


def _over(place: Location, names: Sequence[str], effects: EffectTable) -> Iterator[Conflict]:
    """The conflicts between those that touch one place."""
    writers = {name for name in names if place in effects[name].writes}
    for later, consumer in enumerate(names if writers else ()):
        reads = place in effects[consumer].reads
        for sooner, producer in enumerate(names):
            hazard = _hazard(producer in writers, reads, consumer in writers)
            if hazard is not None and sooner < later:
                yield Conflict(consumer, producer, 0, place, hazard)
            # With itself, too: a writer comes after itself of the iteration before.
            if hazard is not None and place.persistent:
                yield Conflict(consumer, producer, 1, place, hazard)


def _hazard(written: bool, read_after: bool, written_after: bool) -> Hazard | None:
    if written and read_after:
        return "read after write"
    if written and written_after:
        return "write after write"
    return "write after read" if written_after else None
