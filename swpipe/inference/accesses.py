"""Derivation of what each task reads and writes from the observed iterations.

One rule: a task that creates or writes a storage writes what the storage belongs to, and a task
that uses it reads that. A storage belongs to

    a state item           a parameter, a gradient, declared memory
    an attribute of        memory that the iteration made, and that the attribute holds
      the context
    an unnamed state       other memory that outlives an iteration
    no name                other memory of the iteration

Memory that the iteration made is reached through the context: a task that uses it has read an
attribute, and therefore comes after the task that set the attribute. A write in place is a write of
all attributes that hold the memory at that time::

    ctx.a = x          writes a
    ctx.b = ctx.a[0]   reads a, writes b
    y = ctx.a + 1      reads a
    ctx.b.zero_()      reads b, writes b and a: must come after y was computed

Memory can also pass from task to task inside an object that is not inspected, along autograd's
graph, or in an attribute that was deleted since::

    forward    ctx.seam = seam          seam holds a leaf
    backward   ctx.loss.backward()      adds a gradient to the leaf, which no attribute shows
    go on      ctx.seam.leaf.grad       reads ctx.seam, which no task has written since

If two tasks of an iteration use the same memory, one of them creates or writes it, and nothing else
orders the two tasks, the memory is a *transfer*: the later task comes after the earlier one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from swpipe._values.generators import TORCH
from swpipe._values.storages import StorageId, Storages
from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.inference.observing import IterationObservation, TaskObservation
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.places import READ, READ_WRITE, WRITE, Access
from swpipe.inference.states import ATTRIBUTE, StateItem

Accesses: TypeAlias = Mapping[str, Mapping[StateItem, Access]]
"""Task to the attributes and state items that it accesses, and how.

Attributes of the context, generators and unnamed memory have items of their own.
"""


def find_accesses(
    iterations: Sequence[IterationObservation], storages: Storages, seeded: Iterable[str] = ()
) -> Accesses:
    """Return, for each task, what it reads and writes in any of the iterations.

    ``seeded`` are the tasks with ``random=True``.
    """
    runs = [run for iteration in iterations for run in iteration.tasks]
    modified = frozenset[StorageId]().union(*(run.writes - run.operators.created for run in runs))
    if len(iterations) == 1:  # which does not show what the next one writes: any memory may be
        modified = storages.known()
    touches: list[_Touch] = []
    names: dict[StorageId, StateItem] = {}
    for iteration in iterations:
        unnamed = _unnamed(iteration, storages, names)
        for run in iteration.tasks:
            touches += _attribute_touches(run, iteration.before)
            touches += _touches(run, iteration.before | modified, unnamed)
    # A mode that nobody switches needs no order; nor does unnamed memory that nobody writes, or
    # that only its creators use.
    needed = {touch.item for touch in touches if touch.access.writes}
    needed &= {touch.item for touch in touches if not touch.creates}
    accesses = {run.task: defaultdict[StateItem, Access](Access) for run in runs}
    for touch in touches:
        if touch.item in needed or touch.item.kind not in ("mode", "unnamed"):
            accesses[touch.task][touch.item] |= touch.access
    # A seeded task (random=True) replaces the states of torch's default generators while it runs. A
    # task that draws from them without a seed would draw other numbers meanwhile, so both kinds of
    # task conflict, even if the seeded one draws nothing.
    torchs = StateItem.alone(TORCH)
    if any(torchs in of_task for of_task in accesses.values()):
        for task in seeded:
            accesses[task][torchs] |= READ_WRITE
    return accesses


class _Touch(NamedTuple):
    """A task's access to a state item; ``creates`` says that the task made the item's memory."""

    task: str
    item: StateItem
    access: Access
    creates: bool = False


def _attribute_touches(run: TaskObservation, before: frozenset[StorageId]) -> Iterator[_Touch]:
    """Yield a task's accesses to attributes in one iteration.

    A write in place is a write of all attributes that hold the memory, unless the memory is state,
    which attributes only refer to.
    """
    writes = run.writes - before
    written = {name for name, storages in run.held.items() if storages & writes}
    for names, access in ((run.reads, READ), (run.sets | written, WRITE)):
        yield from (_Touch(run.task, StateItem(name, "", ATTRIBUTE), access) for name in names)


def _touches(
    run: TaskObservation, state: frozenset[StorageId], unnamed: Mapping[StorageId, StateItem]
) -> Iterator[_Touch]:
    """Yield a task's accesses to state items in one iteration.

    ``state`` is the memory that existed before the iteration, or that some task writes in place.
    """
    yield from (_Touch(run.task, item, access) for item, access in run.states.items())
    operators = run.operators
    # Other memory is replaced as a whole by the next iteration. A task that reaches it through an
    # attribute, or autograd's engine through the graph, has a reference of its own, and does not
    # read the item that refers to the memory as well.
    apart = run.reached | (operators.replays - operators.reads)
    reads = operators.all_reads - (apart - state)
    writes = run.writes
    alone = [(item, frozenset([number])) for number, item in unnamed.items()]
    for item, storages in (*run.items.items(), *alone):
        access = Access(bool(storages & reads), bool(storages & writes))
        if any(access):
            yield _Touch(run.task, item, access, bool(storages & operators.created))


def _unnamed(
    iteration: IterationObservation, storages: Storages, names: dict[StorageId, StateItem]
) -> dict[StorageId, StateItem]:
    """Return items for the memory that outlives an iteration and belongs to no other item.

    Memory that the iteration made for its context is left out. ``names`` has the items of earlier
    iterations, which share them: memory that survives is the same state in each of them.
    """
    items: set[StorageId] = set()
    held: set[StorageId] = set()
    for run in iteration.tasks:
        items = items.union(*run.items.values())
        held = held.union(*run.held.values())
    numbers = iteration.lasting - items - (held - iteration.before)
    for run in iteration.tasks:
        for number in numbers & (run.operators.all_reads | run.writes) - names.keys():
            described = f"{storages.description(number)}, first seen in {run.task!r}"
            name = f"unnamed memory ({described})"
            names[number] = StateItem(name, name, "unnamed")
    return {number: names[number] for number in numbers & names.keys()}


class MemoryTransfer(NamedTuple):
    """Memory that orders two tasks of an iteration: both use it, and one creates or writes it.

    Attributes:
        consumer: The later task.
        producer: The earlier task.
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
    return tuple(MemoryTransfer(*edge[:2], descriptions[edge]) for edge in missing)


def add_transfers(effects: EffectTable, transfers: Iterable[MemoryTransfer]) -> dict[str, Effects]:
    """Return the effects plus, per transfer, a write of the producer and a read of the consumer."""
    table = dict(effects)
    for consumer, producer, _ in transfers:
        place = frozenset({Location(f"memory from {producer!r} to {consumer!r}", False)})
        table[producer] |= Effects(writes=place)
        table[consumer] |= Effects(reads=place)
    return table


def _shared(iteration: IterationObservation) -> Iterator[tuple[Edge, StorageId]]:
    """Yield each pair of tasks that use the same storage, which one of them creates or writes."""
    # Storage to its users, in serial order, and whether each user writes it.
    users: dict[StorageId, dict[str, bool]] = defaultdict(dict)
    for run in iteration.tasks:
        writes = run.writes
        # A task that reads an attribute may use all memory in it, also outside torch's operators.
        reads = run.operators.all_reads | (run.reached - iteration.before)
        for number in reads | writes:
            users[number][run.task] = number in writes
    for number, writers in users.items():
        for producer, consumer in combinations(writers, 2):
            if writers[producer] or writers[consumer]:
                yield Edge(consumer, producer, 0), number
