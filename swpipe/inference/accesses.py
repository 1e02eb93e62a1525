"""Derives what each task reads and writes from what was observed.

State items (a parameter, a gradient) are states. So is memory that outlives an iteration and
belongs to no item; it is named by a description. Everything else belongs to the iteration and is
reached through attributes of the context: a task that uses it has read an attribute, and so comes
after the task that set it. Only memory that is *modified in place* needs more, since several
attributes can share it (views). It then counts as part of the first attribute that held it::

    ctx.a = x          writes a
    ctx.b = ctx.a[0]   reads a, writes b
    y = ctx.a + 1      reads a
    ctx.b.zero_()      reads b, writes b and a: must come after y was computed

Memory can also pass from task to task inside an object that is not inspected, or along autograd's
graph::

    forward    ctx.seam = seam          seam holds a leaf
    backward   ctx.loss.backward()      adds a gradient to the leaf, which no attribute shows
    go on      ctx.seam.leaf.grad       reads ctx.seam, which no task has written since

If two tasks of an iteration use the same memory, one of them creates or writes it, and nothing else
orders them, it is a *transfer*: the later one comes after the earlier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from swpipe._values.generators import TORCH
from swpipe._values.storages import StorageId, Storages
from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.inference.observing import IterationObservation, TaskObservation
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.places import READ, READ_WRITE, WRITE, Access
from swpipe.inference.states import StateItem, options_of


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
    iterations: Sequence[IterationObservation], storages: Storages, seeded: Iterable[str] = ()
) -> dict[str, TaskAccesses]:
    """Task to what it reads and writes in any of the iterations.

    ``seeded`` are the tasks with ``random=True``.
    """
    found: dict[str, TaskAccesses] = {one.task: TaskAccesses() for one in iterations[0].tasks}
    for iteration in iterations:
        modified = _modified(iteration)
        _add_attributes(iteration, modified, found)
        for observed in iteration.tasks:
            items = found[observed.task].items
            _add_items(
                observed, iteration.before, modified, found[observed.task], len(iterations) == 1
            )
            for name in observed.generators:
                items[StateItem.alone(name)] |= READ_WRITE
            for name in observed.options:
                items[options_of(name)] |= WRITE
            for name in observed.stepped:
                items[options_of(name)] |= READ
    # Tasks that are seeded use torch's default generators, where another task draws without: while
    # they run, the generators have other states, and who draws then draws other numbers.
    torchs = StateItem.alone(TORCH)
    if any(torchs in of_task.items for of_task in found.values()):
        for task in seeded:
            found[task].items[torchs] |= READ_WRITE
    _add_modes(iterations, found)
    _add_unnamed(iterations, storages, found)
    return found


def _modified(iteration: IterationObservation) -> dict[str, set[StorageId]]:
    """Task to the memory of the iteration that it modified, but did not create itself."""
    known = set(iteration.before)
    modified = {}
    for observed in iteration.tasks:
        known = known.union(*observed.held.values())
        modified[observed.task] = (observed.writes & known) - iteration.before
        known |= observed.operators.seen
    return modified


def _add_attributes(
    iteration: IterationObservation,
    modified: Mapping[str, set[StorageId]],
    found: Mapping[str, TaskAccesses],
) -> None:
    """Add accesses to attributes, by name and through the memory that they hold."""
    home: dict[StorageId, str] = {}
    for observed in iteration.tasks:
        for name, numbers in observed.held.items():
            home |= dict.fromkeys(numbers - home.keys(), name)
    any_modified = set[StorageId]().union(*modified.values())
    for observed in iteration.tasks:
        accesses, operators, held = found[observed.task], observed.operators, observed.held
        for name in observed.reads:
            accesses.attributes[name] |= READ
        for name in observed.sets:
            accesses.attributes[name] |= WRITE
        used = operators.all_reads | operators.writes
        used = used.union(*(held.get(name, ()) for name in observed.reads))
        for number in used & any_modified & home.keys():
            accesses.attributes[home[number]] |= READ
        for number in modified[observed.task]:
            names = {name for name, numbers in held.items() if number in numbers}
            for name in names | ({home[number]} if number in home else set()):
                accesses.attributes[name] |= WRITE
                if number in observed.silent - operators.writes:
                    accesses.silent.add(f"ctx.{name}")


def _add_items(
    observed: TaskObservation,
    before: frozenset[StorageId],
    modified: Mapping[str, set[StorageId]],
    accesses: TaskAccesses,
    only: bool,
) -> None:
    """Add accesses to state items.

    If it is of the ``only`` iteration, what that created and kept cannot be recognised.
    """
    any_modified = set[StorageId]().union(*modified.values())
    operators = observed.operators
    through_context = set[StorageId]().union(
        *(observed.held.get(name, ()) for name in observed.reads)
    )
    # Reading memory that this iteration created, through an attribute, does not read the item;
    # nor does what autograd's engine reads by itself (adding to a gradient also writes it).
    saved = set() if only else operators.replays - operators.reads
    read = operators.all_reads - (((through_context - any_modified) | saved) - before)
    for item, storages in observed.items.items():
        if read & storages:
            accesses.items[item] |= READ
        if observed.writes & storages:
            accesses.items[item] |= WRITE
        if (observed.silent - operators.writes) & storages:
            accesses.silent.add(item.name)
    for item in sorted(observed.replaced):
        accesses.items[item] |= WRITE


def _add_modes(
    iterations: Sequence[IterationObservation], accesses: Mapping[str, TaskAccesses]
) -> None:
    """Add modules' modes as far as some task switches them: whoever runs the module reads it."""
    runs = [one for iteration in iterations for one in iteration.tasks]
    switched = {name for one in runs for name in one.switched}
    for one in runs:
        for name in switched & (one.ran | one.switched):
            item = StateItem(f"{name} mode", name, "mode")
            accesses[one.task].items[item] |= (True, name in one.switched)


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
                described = f"{storages.description(number)}, first seen in {observed.task!r}"
                item = items.setdefault(number, StateItem.alone(f"unnamed memory ({described})"))
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
        held = held.union(*observed.held.values())
    return items | (held - iteration.before)


class MemoryTransfer(NamedTuple):
    """The consumer uses memory from the producer of the same iteration.

    Attributes:
        description: Data type and shape of some of it.
    """

    consumer: str
    producer: str
    description: str


def find_transfers(
    iterations: Iterable[IterationObservation], effects: EffectTable, storages: Storages
) -> tuple[MemoryTransfer, ...]:
    """The fewest transfers that order what the effects do not order yet."""
    descriptions: dict[Edge, str] = {}
    for iteration in iterations:
        for edge, number in _shared(iteration):
            descriptions.setdefault(edge, storages.description(number))
    known = Orders(tuple(effects), map(edge_of, conflicts(effects)))
    missing = known.missing(descriptions)
    return tuple(
        MemoryTransfer(edge.consumer, edge.producer, descriptions[edge]) for edge in missing
    )


def add_transfers(effects: EffectTable, transfers: Iterable[MemoryTransfer]) -> dict[str, Effects]:
    """The effects, with transfers as additional reads and writes."""
    table = dict(effects)
    for one in transfers:
        name = f"memory from {one.producer!r} to {one.consumer!r}"
        place = frozenset({Location(name, False)})
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
