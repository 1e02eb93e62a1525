"""Derives what each task reads and writes from what was observed.

State items (a parameter, a gradient) are states. So is memory that outlives an iteration and
belongs to no item; it is named by a description. Everything else belongs to the iteration and is
reached through attributes of the context: a task that uses it has read an attribute, and so comes
after the task that set it. Only *modifying in place* needs more, since several attributes can share
an object (views, lists). It then counts as part of the first attribute that held it, its home::

    ctx.a = x          writes a
    ctx.b = ctx.a[0]   reads a, writes b
    y = ctx.a + 1      reads a
    ctx.b.zero_()      reads b, writes b and a: must come after y was computed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swpipe._state.generators import TORCH
from swpipe.inference.observation import IterationObservation, TaskObservation
from swpipe.inference.state_items import StateItem
from swpipe.inference.state_snapshot import ObjectId
from swpipe.inference.storages import StorageId, Storages


class Access(NamedTuple):
    """Whether a task reads and writes something."""

    reads: bool = False
    writes: bool = False

    def __or__(self, other: tuple[bool, ...]) -> Access:
        return Access(self.reads or other[0], self.writes or other[1])


READ, WRITE, READ_WRITE = Access(True, False), Access(False, True), Access(True, True)


@dataclass
class TaskAccesses:
    """What one task reads and writes.

    Attributes:
        attributes: Attribute of the context to access.
        items: State item to access; generators and unnamed memory get items of their own.
        silent: Names of items and attributes that it modified without a recorded operator.
    """

    attributes: dict[str, Access] = field(default_factory=lambda: defaultdict(Access))
    items: dict[StateItem, Access] = field(default_factory=lambda: defaultdict(Access))
    silent: set[str] = field(default_factory=set)


def find_accesses(
    iterations: Iterable[IterationObservation], storages: Storages, seeded: Iterable[str] = ()
) -> dict[str, TaskAccesses]:
    """Task to what it reads and writes in any of the iterations.

    ``seeded`` are the tasks with ``random=True``.
    """
    iterations = tuple(iterations)
    found: dict[str, TaskAccesses] = {one.task: TaskAccesses() for one in iterations[0].tasks}
    for iteration in iterations:
        analysis = _IterationAnalysis(iteration, only=len(iterations) == 1)
        for observed in iteration.tasks:
            accesses = found[observed.task]
            analysis.add_attributes(observed, accesses)
            analysis.add_items(observed, accesses)
            for name in observed.changes.generators:
                accesses.items[StateItem(name, name, "")] |= READ_WRITE
            for name in observed.changes.options:
                accesses.items[options_of(name)] |= WRITE
            for name in observed.stepped:
                accesses.items[options_of(name)] |= READ
    _add_seeding(seeded, found)
    _add_modes(iterations, found)
    _add_unnamed(iterations, storages, found)
    return found


def _add_seeding(seeded: Iterable[str], accesses: Mapping[str, TaskAccesses]) -> None:
    """Tasks that are seeded use torch's default generators, where another task draws without.

    While they run, the generators have other states: who draws then draws other numbers.
    """
    item = StateItem(TORCH, TORCH, "")
    if any(item in of_task.items for of_task in accesses.values()):
        for task in seeded:
            accesses[task].items[item] |= READ_WRITE


def _add_modes(
    iterations: Sequence[IterationObservation], accesses: Mapping[str, TaskAccesses]
) -> None:
    """Add modules' modes as far as some task switches them: whoever runs the module reads it."""
    runs = [(one.task, one.modes) for iteration in iterations for one in iteration.tasks]
    switched = {name for _, modes in runs for name in modes.switched}
    for task, modes in runs:
        for name in switched & (modes.ran | modes.switched):
            item = StateItem(f"{name} mode", name, "mode")
            accesses[task].items[item] |= (True, name in modes.switched)


class _IterationAnalysis:
    """One iteration: which storages are state, and which objects were modified in place.

    If it is the ``only`` one, what it created and kept cannot be recognised.
    """

    def __init__(self, iteration: IterationObservation, *, only: bool) -> None:
        self._before, self._only = iteration.before, only
        self._home: dict[ObjectId, str] = {}
        self._modified: dict[str, frozenset[ObjectId]] = {}
        known = set(iteration.before)
        for observed in iteration.tasks:
            for name, objects in observed.objects.items():
                for one in objects:
                    self._home.setdefault(one, name)
                known |= {one.number for one in objects if one.kind == "storage"}
            # What the task created itself does not count as modified.
            written = (observed.operators.writes | observed.changes.storages) & known
            self._modified[observed.task] = observed.changes.objects | {
                ObjectId("storage", number) for number in written - self._before
            }
            known |= observed.operators.seen
        self._any_modified = frozenset[ObjectId]().union(*self._modified.values())

    def add_attributes(self, observed: TaskObservation, accesses: TaskAccesses) -> None:
        """Add accesses to attributes, by name and through the objects that they hold."""
        for name in observed.attributes.reads:
            accesses.attributes[name] |= READ
        for name in observed.attributes.sets | observed.attributes.deletes:
            accesses.attributes[name] |= WRITE
        operators = observed.operators
        used = {one for name in observed.attributes.reads for one in observed.objects.get(name, ())}
        used |= {ObjectId("storage", n) for n in operators.all_reads | operators.writes}
        for one in used & self._any_modified:
            if one in self._home:
                accesses.attributes[self._home[one]] |= READ
        for one in self._modified[observed.task]:
            names = {name for name, objects in observed.objects.items() if one in objects}
            for name in names | ({self._home[one]} if one in self._home else set()):
                accesses.attributes[name] |= WRITE
                if one.number in observed.changes.silent - operators.writes:
                    accesses.silent.add(f"ctx.{name}")

    def add_items(self, observed: TaskObservation, accesses: TaskAccesses) -> None:
        """Add accesses to state items."""
        through_context = frozenset(
            one.number
            for name in observed.attributes.reads
            for one in observed.objects.get(name, ())
            if one.kind == "storage" and one not in self._any_modified
        )
        # Reading memory that this iteration created, through an attribute, does not read the item;
        # nor does what autograd's engine reads by itself (adding to a gradient also writes it).
        operators = observed.operators
        saved = set() if self._only else operators.replays - operators.reads
        read = operators.all_reads - ((through_context | saved) - self._before)
        for item, storages in observed.items.items():
            if read & storages:
                accesses.items[item] |= READ
            if (operators.writes | observed.changes.storages) & storages:
                accesses.items[item] |= WRITE
            if (observed.changes.silent - operators.writes) & storages:
                accesses.silent.add(item.name)
        for item in sorted(observed.changes.items):
            accesses.items[item] |= WRITE


def options_of(optimizer: str) -> StateItem:
    """An optimizer's options other than the parameters, such as the learning rate."""
    return StateItem(f"{optimizer} options", optimizer, "options")


def _add_unnamed(
    iterations: Iterable[IterationObservation],
    storages: Storages,
    accesses: Mapping[str, TaskAccesses],
) -> None:
    """Add accesses to memory that outlives an iteration and belongs to no state item."""
    items: dict[StorageId, StateItem] = {}
    used: set[StateItem] = set()  # by a task that did not create it in the same iteration
    found: dict[str, dict[StateItem, Access]] = {task: defaultdict(Access) for task in accesses}
    for iteration in iterations:
        unnamed = (iteration.before | iteration.survivors) - _named(iteration)
        for observed in iteration.tasks:
            operators = observed.operators
            reads, written = operators.all_reads, operators.created | operators.writes
            for number in (reads | written) & unnamed:
                item = items.setdefault(
                    number, _unnamed_item(storages.description(number), observed.task)
                )
                found[observed.task][item] |= (number in reads, number in written)
                if number not in operators.created:
                    used.add(item)
    modified = {item for of_task in found.values() for item, one in of_task.items() if one.writes}
    for task, of_task in found.items():
        for item, access in of_task.items():
            if item in modified & used:
                accesses[task].items[item] |= access


def _named(iteration: IterationObservation) -> set[StorageId]:
    """Storages of state items, and those that this iteration created and put into the context."""
    items: set[StorageId] = set()
    held: set[StorageId] = set()
    for observed in iteration.tasks:
        items = items.union(*observed.items.values())
        held |= {one.number for objects in observed.objects.values() for one in objects}
    return items | (held - iteration.before)


def _unnamed_item(description: str, task: str) -> StateItem:
    name = f"unnamed memory ({description}, first seen in {task!r})"
    return StateItem(name, name, "")
