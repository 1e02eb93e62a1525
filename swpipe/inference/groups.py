"""Groups state items into few named states.

Items of one owner and kind that all tasks access alike form one state. So do items that tasks
access differently, if treating them as one needs no order that is not needed anyway: backward reads
a layer's weight, but not its bias; because of the gradients it comes before the step in any case.

Items in declared memory form the declared state. The orders that it needs do not count when other
items are grouped, since a plan may allow the declared state to be stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from operator import or_
from typing import TypeAlias

from swpipe.core.effects import Effects, Location, conflicts
from swpipe.inference.accesses import Access, TaskAccesses
from swpipe.inference.declared import DECLARED
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.state_items import StateItem

Pattern: TypeAlias = tuple[Access, ...]
"""Each task's access to an item."""


def group(accesses: Mapping[str, TaskAccesses]) -> dict[str, tuple[StateItem, ...]]:
    """State to its items; each item that any task accesses is in one state."""
    alike: dict[tuple[str, str], dict[Pattern, list[StateItem]]] = defaultdict(dict)
    states: dict[str, tuple[StateItem, ...]] = {}
    for item in sorted({item for of_task in accesses.values() for item in of_task.items}):
        if item.kind == DECLARED:
            states[item.owner] = (*states.get(item.owner, ()), item)
            continue
        pattern = tuple(of_task.items.get(item, Access()) for of_task in accesses.values())
        alike[item.owner, item.kind].setdefault(pattern, []).append(item)
    orders = _orders(accesses, (pattern for patterns in alike.values() for pattern in patterns))
    for (owner, kind), patterns in alike.items():
        groups = list(patterns.values())
        union = tuple(reduce(or_, of_task) for of_task in zip(*patterns, strict=True))
        if kind and all(orders.implies(edge) for edge in _edges(tuple(accesses), union)):
            groups = [sorted(item for items in groups for item in items)]
        for items in groups:
            names = _names(owner, kind, items, only=len(groups) == 1)
            states[next(name for name in names if name not in states)] = tuple(items)
    return states


def _orders(accesses: Mapping[str, TaskAccesses], patterns: Iterable[Pattern]) -> Orders:
    """The orders that attributes need, and each item by itself."""
    tasks = tuple(accesses)
    orders = Orders(tasks)
    edges = {edge for pattern in set(patterns) for edge in _edges(tasks, pattern)}
    edges |= {edge_of(conflict) for conflict in conflicts(effects_of(accesses, {}))}
    orders.missing(edges)
    return orders


def _edges(tasks: Sequence[str], pattern: Pattern) -> Iterator[Edge]:
    """The orders that one state with this pattern needs."""
    place = Location("it", True)
    table = {task: _effects([(place, a)]) for task, a in zip(tasks, pattern, strict=True)}
    return (edge_of(conflict) for conflict in conflicts(table))


def _names(owner: str, kind: str, items: Sequence[StateItem], *, only: bool) -> Iterable[str]:
    """Possible names of a group, the best first; the last one is unique.

    ``only`` says that the group has all items of the owner and kind.
    """
    if len(items) == 1:
        yield items[0].name
    if only and kind:
        yield f"{owner} {kind}"
    prefix = _common([item.name for item in items])
    if prefix and prefix != owner and len(items) > 1:
        yield f"{prefix} {kind}".strip()
    yield f"{items[0].name} and {len(items) - 1} more"
    yield " + ".join(item.name for item in items)


def _common(names: Sequence[str]) -> str:
    """The dotted prefix that all names share."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(alike[0] for alike in takewhile(lambda part: len(set(part)) == 1, parts))


def effects_of(
    accesses: Mapping[str, TaskAccesses], states: Mapping[str, tuple[StateItem, ...]]
) -> dict[str, Effects]:
    """Task to its effects, in serial order; items that are in no state are left out."""
    state_of = {item: name for name, items in states.items() for item in items}
    table = {}
    for task, of_task in accesses.items():
        found = [(Location(name, False), access) for name, access in of_task.attributes.items()]
        items = [item for item in of_task.items if item in state_of]
        found += [(Location(state_of[item], True), of_task.items[item]) for item in items]
        table[task] = _effects(found)
    return table


def _effects(accesses: Sequence[tuple[Location, Access]]) -> Effects:
    return Effects(
        frozenset(place for place, access in accesses if access.reads),
        frozenset(place for place, access in accesses if access.writes),
    )
