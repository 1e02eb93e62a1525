"""What tasks read and write, and which of them must therefore keep their serial order.

A *location* is an attribute of the context, which each iteration has for itself, or a state, which
persists between iterations. Whoever says nothing (a task, the body of the loop, a loader) uses and
changes everything that is not said to be apart from it (``anything``): the state ``UNDECLARED``,
and each named state, as far as ``DeclaredIO.others`` lets it. Two tasks *conflict* if both access a
location and one of them writes it. A plan that orders all conflicts like a serial run gives the
same numbers.

Conflicts over an attribute are within one iteration: distance 0. For a state it is enough to order
each pair within an iteration (distance 0, in serial order) and between successive iterations
(distance 1: every pair in both directions, and each writer after itself). Larger distances follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.messages import plain
from swpipe.core.plan import BODY, OTHERS, PULL
from swpipe.core.task import PipelineTask


class Location(NamedTuple):
    """An attribute or, if persistent, a state; it may be "unnamed memory (...)".

    ``on_host``: no device work uses the state (``DeclaredIO.on_host``).
    """

    name: str
    persistent: bool
    on_host: bool = False

    def __str__(self) -> str:
        if self.persistent:
            return f"state {self.name!r}"
        return f"ctx.{self.name}" if self.name.isidentifier() else plain(self.name)


UNDECLARED = Location("undeclared", True)
"""Whatever is touched by those of whom nothing is declared, and is not a named state."""

DRAWS = Location("torch's default generators", True)
"""Whoever says nothing may draw: it writes. A random task, which is seeded for itself, reads: the
two may come in either order, but not run at the same time."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What one task may read, and may set, delete or modify in place, in one iteration.

    Attributes:
        reads: What it may read.
        writes: What it may write.
    """

    reads: frozenset[Location] = frozenset()
    writes: frozenset[Location] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)

    @property
    def undeclared(self) -> bool:
        """Whether it may touch anything of which nothing is declared."""
        return UNDECLARED in self.reads | self.writes


UNKNOWN = Effects(frozenset([UNDECLARED, DRAWS]), frozenset([UNDECLARED, DRAWS]))
"""Of a task or a loader of which nothing is declared, where no state is named."""


EffectTable: TypeAlias = Mapping[str, Effects]
"""Task name to its effects, in serial order."""

Hazard: TypeAlias = Literal["read after write", "write after read", "write after write"]


class Conflict(NamedTuple):
    """The consumer on iteration i must run after the producer on iteration i - distance."""

    consumer: str
    producer: str
    distance: int
    place: Location
    hazard: Hazard


@dataclass(frozen=True, slots=True)
class Declared:
    """What tasks declare of what they touch outside their contexts.

    Attributes:
        named: Task to the states that it names, and torch's generators where it is random.
        unknown: What somebody who says nothing may touch, beside these tasks.
        silent: The tasks that say nothing.
    """

    named: dict[str, Effects]
    unknown: Effects
    silent: frozenset[str]

    @classmethod
    def by(cls, tasks: Iterable[PipelineTask]) -> Declared:
        """What these tasks declare."""
        tasks = tuple(tasks)
        said = [(task.name, io) for task in tasks for io in task.io if io.state]
        on_device = {io.state for _, io in said if not io.on_host}  # one is enough
        found: dict[str, tuple[list[Location], list[Location]]] = {t.name: ([], []) for t in tasks}
        for name, io in said:
            place = Location(str(io.state), True, io.state not in on_device)
            for places, way in zip(found[name], "rw", strict=True):
                if way in io.mode:
                    places.append(place)
        states = {place for both in found.values() for places in both for place in places}
        unread, unwritten = ({io.state for _, io in said if one not in io.others} for one in "rw")
        unknown = _anything(states, unread, unwritten)
        for task in tasks:
            if task.random:
                found[task.name][0].append(DRAWS)
        named = {name: Effects(frozenset(r), frozenset(w)) for name, (r, w) in found.items()}
        return cls(named, unknown, frozenset([task.name for task in tasks if task.undeclared]))

    @property
    def effects(self) -> dict[str, Effects]:
        """The effects of all tasks; of those that say nothing, all that they may touch."""
        silent, unknown = self.silent, self.unknown
        return {n: one | unknown if n in silent else one for n, one in self.named.items()}


def declared_effects(tasks: Iterable[PipelineTask]) -> dict[str, Effects]:
    """The effects that the tasks declare.

    A task that says nothing touches whatever is not said to be apart from it.
    """
    return Declared.by(tasks).effects


def unknown_beside(tasks: Iterable[PipelineTask]) -> Effects:
    """What somebody who says nothing may touch, beside these tasks."""
    return Declared.by(tasks).unknown


def anything(named: Iterable[Effects]) -> Effects:
    """What whoever says nothing may touch, beside those who touch this."""
    return _anything({place for one in named for place in one.reads | one.writes})


def _anything(
    places: Iterable[Location],
    unread: Collection[str | None] = (),
    unwritten: Collection[str | None] = (),
) -> Effects:
    """What whoever says nothing may touch: this is the rule between what is said and what is not.

    It is all but the context, which each iteration has for itself, and states of which it is said
    that others do not touch them. What pure tasks use is apart by their word.
    """
    states = {place for place in places if place.persistent} | {UNDECLARED, DRAWS}
    return Effects(
        frozenset([place for place in states if place.name not in unread]),
        frozenset([place for place in states if place.name not in unwritten]),
    )


def with_the_others(
    effects: EffectTable, unknown: Effects, *, apart: bool, body: bool
) -> dict[str, Effects]:
    """A table with entries of the loader, the first, and of the loop's body, the last.

    Args:
        effects: Of tasks, and maybe of the others already.
        unknown: What they touch if the table has no entry of them.
        apart: Whether a loader of which there is no entry is known to touch nothing.
        body: Whether there is a body.
    """
    pull = effects.get(PULL, Effects() if apart else unknown)
    table = {PULL: pull} | {n: touched for n, touched in effects.items() if n not in OTHERS}
    return table | ({BODY: effects.get(BODY, unknown)} if body else {})


def conflicts(effects: EffectTable) -> list[Conflict]:
    """Every conflict, by consumer, with one hazard each; ``effects`` is in serial order."""
    users: dict[Location, list[str]] = defaultdict(list)
    for name, touched in effects.items():
        for place in touched.reads | touched.writes:
            users[place].append(name)
    serial = {name: number for number, name in enumerate(effects)}
    found = [each for place, names in users.items() for each in _over(place, names, effects)]
    return sorted(found, key=lambda c: (serial[c.consumer], serial[c.producer], *c[2:4]))


def _over(place: Location, names: Sequence[str], effects: EffectTable) -> list[Conflict]:
    """The conflicts between the tasks that access one location."""
    writers = {name: at for at, name in enumerate(names) if place in effects[name].writes}
    everyone = {name: at for at, name in enumerate(names)}
    found: list[Conflict] = []
    for consumer, later in (everyone if writers else {}).items():
        reads = place in effects[consumer].reads
        # One of the two writes: a reader's conflicts are with writers alone.
        for producer, sooner in (everyone if consumer in writers else writers).items():
            hazard = _HAZARDS.get((producer in writers, reads, consumer in writers))
            if hazard is not None and sooner < later:
                found.append(Conflict(consumer, producer, 0, place, hazard))
            # Also with itself: a writer runs after itself on the iteration before.
            if hazard is not None and place.persistent:
                found.append(Conflict(consumer, producer, 1, place, hazard))
    return found


_HAZARDS: dict[tuple[bool, bool, bool], Hazard] = {
    (True, True, True): "read after write",
    (True, True, False): "read after write",
    (True, False, True): "write after write",
    (False, True, True): "write after read",
    (False, False, True): "write after read",
}
"""Whether the producer writes, the consumer reads, and the consumer writes."""
