"""Derivation of what each task reads and writes from the observed iterations.

State items (a parameter, a gradient) are states. Memory that outlives an iteration and belongs to
no item is a state too; its name is a description. All other memory belongs to the iteration and is
reached through attributes of the context: a task that uses the memory has read an attribute, and
therefore comes after the task that set the attribute. Only memory that is *modified in place* needs
more, since several attributes can share it (views). A modification counts as an access to the first
attribute that held the memory::

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
orders the two tasks, the memory is a *transfer*: the later task comes after the earlier one.
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
    """The attributes and state items that one task reads and writes.

    Attributes:
        attributes: Attribute of the context to access.
        items: State item to access; generators and unnamed memory have items of their own.
        silent: Names of items and attributes that the task modified without a recorded operator.
    """

    attributes: dict[str, Access] = field(default_factory=lambda: defaultdict(Access))
    items: dict[StateItem, Access] = field(default_factory=lambda: defaultdict(Access))
    silent: set[str] = field(default_factory=set)


def find_accesses(
    iterations: Sequence[IterationObservation], storages: Storages, seeded: Iterable[str] = ()
) -> dict[str, TaskAccesses]:
    """Return, for each task, what it reads and writes in any of the iterations.

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
    # A seeded task (random=True) replaces the states of torch's default generators while it runs. A
    # task that draws from them without a seed would draw other numbers meanwhile, so both kinds of
    # task conflict, even if the seeded one draws nothing.
    torchs = StateItem.alone(TORCH)
    if any(torchs in of_task.items for of_task in found.values()):
        for task in seeded:
            found[task].items[torchs] |= READ_WRITE
    _add_modes(iterations, found)
    _add_unnamed(iterations, storages, found)
    return found


def _modified(iteration: IterationObservation) -> dict[str, set[StorageId]]:
    """Return, for each task, the iteration's memory that it modified but did not create."""
    known = set(iteration.before)
    modified = {}
    for observed in iteration.tasks:
        # Attributes can hold memory that no operator has seen, such as a batch made with numpy.
        known = known.union(*observed.held.values())
        modified[observed.task] = (observed.writes & known) - iteration.before
        known |= observed.operators.seen
    return modified


def _add_attributes(
    iteration: IterationObservation,
    modified: Mapping[str, set[StorageId]],
    found: Mapping[str, TaskAccesses],
) -> None:
    """Add accesses to attributes, by name and through the memory that the attributes hold."""
    # Views share memory: an access to the memory is an access to the first attribute that held it.
    home: dict[StorageId, str] = {}
    for observed in iteration.tasks:
        for name, numbers in observed.held.items():
            home |= dict.fromkeys(numbers - home.keys(), name)
    any_modified = set[StorageId]().union(*modified.values())
    for observed in iteration.tasks:
        accesses = found[observed.task]
        operators = observed.operators
        held = observed.held
        for name in observed.reads:
            accesses.attributes[name] |= READ
        for name in observed.sets:
            accesses.attributes[name] |= WRITE
        # A task that reads an attribute may use all memory in it, also outside torch's operators.
        used = operators.all_reads | operators.writes
        used = used.union(*(held.get(name, ()) for name in observed.reads))
        # Memory that nobody modifies in place is ordered by the attribute itself, which its reader
        # has read.
        for number in used & any_modified & home.keys():
            accesses.attributes[home[number]] |= READ
        for number in modified[observed.task]:
            names = {name for name, numbers in held.items() if number in numbers}
            for name in names | ({home[number]} if number in home else set()):
                accesses.attributes[name] |= WRITE
                # Neither a schema nor a version counter shows a silent write: it was found by the
                # content.
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

    With ``only``, there is a single iteration, and memory that the iteration created and kept
    cannot be told from memory that existed before.
    """
    any_modified = set[StorageId]().union(*modified.values())
    operators = observed.operators
    through_context = set[StorageId]().union(
        *(observed.held.get(name, ()) for name in observed.reads)
    )
    # Reading memory that this iteration created, through an attribute, does not read the item; nor
    # does a read by autograd's engine itself (adding to a gradient also writes the gradient).
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
    """Add accesses to the modes of modules that some task switches.

    A task that runs a module reads the module's mode.
    """
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
    # Iterations share the items: a storage that survives is the same state in each of them.
    items: dict[StorageId, StateItem] = {}
    used: set[StateItem] = set()  # by a task that did not create it in the same iteration
    found: dict[str, dict[StateItem, Access]] = {task: defaultdict(Access) for task in accesses}
    for iteration in iterations:
        unnamed = (iteration.before | iteration.survivors) - _named(iteration)
        for observed in iteration.tasks:
            operators = observed.operators
            reads = operators.all_reads
            written = operators.created | operators.writes
            for number in (reads | written) & unnamed:
                described = f"{storages.description(number)}, first seen in {observed.task!r}"
                item = items.setdefault(number, StateItem.alone(f"unnamed memory ({described})"))
                found[observed.task][item] |= (number in reads, number in written)
                if number not in operators.created:
                    used.add(item)
    # Memory that nobody modifies, or that only its creators use, needs no order.
    modified = {item for of_task in found.values() for item, one in of_task.items() if one.writes}
    for task, of_task in found.items():
        for item, access in of_task.items():
            if item in modified & used:
                accesses[task].items[item] |= access


def _named(iteration: IterationObservation) -> set[StorageId]:
    """Return the storages of state items, and those that the iteration created for its context."""
    items: set[StorageId] = set()
    held: set[StorageId] = set()
    for observed in iteration.tasks:
        items = items.union(*observed.items.values())
        held = held.union(*observed.held.values())
    return items | (held - iteration.before)


class MemoryTransfer(NamedTuple):
    """Memory that a consumer uses and a producer of the same iteration created or wrote.

    Attributes:
        description: Data type and shape of one of the tensors.
    """

    consumer: str
    producer: str
    description: str


def find_transfers(
    iterations: Iterable[IterationObservation], effects: EffectTable, storages: Storages
) -> tuple[MemoryTransfer, ...]:
    """Return the fewest transfers that order the pairs of tasks that the effects do not order."""
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
    """Return the effects plus, per transfer, a write of the producer and a read of the consumer."""
    table = dict(effects)
    for one in transfers:
        name = f"memory from {one.producer!r} to {one.consumer!r}"
        place = frozenset({Location(name, False)})
        table[one.producer] |= Effects(writes=place)
        table[one.consumer] |= Effects(reads=place)
    return table


def _shared(iteration: IterationObservation) -> Iterator[tuple[Edge, StorageId]]:
    """Yield each pair of tasks that access the same storage, at least one of them writing it.

    A task that creates the storage counts as writing it.
    """
    # Storage to its users, in serial order, and whether each user writes it.
    users: dict[StorageId, dict[str, bool]] = defaultdict(dict)
    for observed in iteration.tasks:
        written = observed.operators.created | observed.operators.writes
        for number in observed.operators.all_reads | written:
            users[number][observed.task] = number in written
    for number, writes in users.items():
        for producer, consumer in combinations(writes, 2):
            if writes[producer] or writes[consumer]:
                yield Edge(consumer, producer, 0), number
