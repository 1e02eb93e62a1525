"""The effects of tasks, and which tasks must therefore keep their serial order.

A *location* is an attribute of the context, which each iteration has for itself, or a state, which
persists between iterations. Undeclared code (a task, the body of the loop, a loader) is assumed to
read and write every state that is not declared private (``undeclared_effects``): the state
``UNDECLARED``, and each named state, as far as ``DeclaredIO.others`` allows. Two tasks *conflict*
if both access a location and one of them writes it. A plan that orders all conflicts like a serial
run gives the same numbers.

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
    """An attribute or, if persistent, a state; its name may be "unnamed memory (...)".

    Attributes:
        name: The name of the attribute or state.
        persistent: Whether it is a state.
        on_host: Whether no device work uses the state (``DeclaredIO.on_host``). A table of effects
            that joins declarations with a recording has a state one way: ``one_place_each``.
    """

    name: str
    persistent: bool
    on_host: bool = False

    def __str__(self) -> str:
        if self.persistent:
            return f"state {self.name!r}"
        return f"ctx.{self.name}" if self.name.isidentifier() else plain(self.name)


UNDECLARED = Location("undeclared", True)
"""The state that stands for everything that undeclared code touches and that has no name."""

DRAWS = Location("torch's default generators", True)
"""The state of torch's default generators. Undeclared code may draw: it writes. A random task is
seeded by itself: it reads. Tasks of the two kinds may run in either order, but not at the same
time."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The locations that one task may access in one iteration.

    Attributes:
        reads: The locations that it may read.
        writes: The locations that it may set, delete or modify in place.
    """

    reads: frozenset[Location] = frozenset()
    writes: frozenset[Location] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)

    @property
    def places(self) -> frozenset[Location]:
        """All locations that it may access."""
        return self.reads | self.writes

    @property
    def undeclared(self) -> bool:
        """Whether the task may touch state without a declaration."""
        return UNDECLARED in self.reads or UNDECLARED in self.writes


EffectTable: TypeAlias = Mapping[str, Effects]
"""Task name to the task's effects, in serial order."""

Hazard: TypeAlias = Literal["read after write", "write after read", "write after write"]


class Conflict(NamedTuple):
    """A pair of accesses: the consumer on iteration i runs after the producer on i - distance."""

    consumer: str
    producer: str
    distance: int
    place: Location
    hazard: Hazard


@dataclass(frozen=True, slots=True)
class Declared:
    """The effects outside the context that tasks declare.

    Attributes:
        named: Task to the states that it names, and torch's generators if it is random.
        undeclared: The effects of undeclared code that runs beside these tasks.
        undeclared_tasks: The tasks that declare nothing.
    """

    named: dict[str, Effects]
    undeclared: Effects
    undeclared_tasks: frozenset[str]

    @classmethod
    def by(cls, tasks: Iterable[PipelineTask]) -> Declared:
        """Collect the declarations of tasks."""
        tasks = tuple(tasks)
        declarations = [(task.name, io) for task in tasks for io in task.io if io.state]
        # A state is on the host only if all tasks that name it say so.
        on_device = {io.state for _, io in declarations if not io.on_host}
        # Task to the states that it reads, and those that it writes.
        named: dict[str, tuple[list[Location], list[Location]]] = {
            task.name: ([DRAWS] if task.random else [], []) for task in tasks
        }
        for name, io in declarations:
            place = Location(str(io.state), True, io.state not in on_device)
            for places, way in zip(named[name], "rw", strict=True):
                if way in io.mode:
                    places.append(place)
        effects = {name: Effects(frozenset(r), frozenset(w)) for name, (r, w) in named.items()}
        # One task's restriction of ``others`` is enough: it holds for the state.
        unread, unwritten = (
            {io.state for _, io in declarations if way not in io.others} for way in "rw"
        )
        undeclared = undeclared_effects(effects.values(), unread, unwritten)
        return cls(effects, undeclared, frozenset(task.name for task in tasks if task.undeclared))

    @property
    def effects(self) -> dict[str, Effects]:
        """The effects of all tasks; an undeclared task has all that it may touch."""
        return {
            name: named | self.undeclared if name in self.undeclared_tasks else named
            for name, named in self.named.items()
        }


def undeclared_effects(
    beside: Iterable[Effects] = (),
    unread: Collection[str | None] = (),
    unwritten: Collection[str | None] = (),
) -> Effects:
    """Return the effects of undeclared code, by the one rule for what declarations leave open.

    They are all states that ``beside`` names, except those that are declared not to be touched by
    other code. The context is left out, since each iteration has its own. What pure tasks use is
    apart by declaration.

    Args:
        beside: The effects of all other code.
        unread: The states that undeclared code does not read.
        unwritten: The states that undeclared code does not write.
    """
    # Two states are always included. UNDECLARED makes any two undeclared tasks conflict, so that
    # they keep their serial order. DRAWS is there because undeclared code may draw, whether or not
    # a task is random.
    states = {p for effects in beside for p in effects.reads | effects.writes if p.persistent}
    states |= {UNDECLARED, DRAWS}
    return Effects(
        frozenset([place for place in states if place.name not in unread]),
        frozenset([place for place in states if place.name not in unwritten]),
    )


def with_the_others(
    effects: EffectTable, undeclared: Effects, *, apart: bool, body: bool
) -> dict[str, Effects]:
    """Return a table of effects with the loader first and the loop's body last.

    Args:
        effects: The effects of tasks; may already have entries of loader and body.
        undeclared: The effects of loader and body if the table has no entry of them.
        apart: Whether a loader without an entry is known to touch nothing.
        body: Whether there is a body.
    """
    pull = effects.get(PULL, Effects() if apart else undeclared)
    # The order of the table is the serial order: pull, tasks, body.
    table = {PULL: pull} | {n: touched for n, touched in effects.items() if n not in OTHERS}
    return table | ({BODY: effects.get(BODY, undeclared)} if body else {})


def unnamed_changes(effects: EffectTable, declared: Declared) -> Effects:
    """Return the states that tasks change and no task names, which undeclared code may use.

    If a task names its states but was seen to change another one, its declaration does not keep
    that state private.
    """
    named = {place.name for touched in declared.named.values() for place in touched.places}
    changed = {
        place
        for name, touched in effects.items()
        if name not in OTHERS
        for place in touched.writes
        if place.persistent and place.name not in named
    }
    return Effects(frozenset(changed), frozenset(changed))


def one_place_each(effects: EffectTable) -> EffectTable:
    """Return effects in which a state is on the host only if all tasks that touch it agree.

    One task may declare a state that another one was seen to touch. As two locations, they would
    not conflict.
    """
    places = {place for touched in effects.values() for place in touched.places}
    split = {place for place in places if place.on_host and place._replace(on_host=False) in places}
    if not split:
        return effects
    one = {place: place._replace(on_host=False) for place in split}
    return {
        name: Effects(
            frozenset([one.get(place, place) for place in touched.reads]),
            frozenset([one.get(place, place) for place in touched.writes]),
        )
        for name, touched in effects.items()
    }


def conflicts(effects: EffectTable) -> list[Conflict]:
    """Return all conflicts, by consumer, with one hazard each; ``effects`` is in serial order."""
    # Tasks by location, so that only tasks that share one are compared.
    users: dict[Location, list[str]] = defaultdict(list)
    for name, touched in effects.items():
        for place in touched.reads | touched.writes:
            users[place].append(name)
    serial = {name: number for number, name in enumerate(effects)}
    conflicts = [each for place, names in users.items() for each in _over(place, names, effects)]
    return sorted(conflicts, key=lambda c: (serial[c.consumer], serial[c.producer], *c[2:4]))


def _over(place: Location, names: Sequence[str], effects: EffectTable) -> list[Conflict]:
    """Return the conflicts between the tasks that access one location."""
    writers = {name: at for at, name in enumerate(names) if place in effects[name].writes}
    everyone = {name: at for at, name in enumerate(names)}
    conflicts: list[Conflict] = []
    for consumer, later in (everyone if writers else {}).items():
        reads = place in effects[consumer].reads
        # One of the two must write: a reader conflicts with writers only.
        for producer, sooner in (everyone if consumer in writers else writers).items():
            hazard: Hazard = "write after read"
            if producer in writers:
                hazard = "read after write" if reads else "write after write"
            if sooner < later:
                conflicts.append(Conflict(consumer, producer, 0, place, hazard))
            # A writer also conflicts with itself, on the previous iteration.
            if place.persistent:
                conflicts.append(Conflict(consumer, producer, 1, place, hazard))
    return conflicts
