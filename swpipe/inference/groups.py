"""Many slots under few names.

Slots of one owner and one kind that all tasks use alike are one state. So are those that tasks use
differently, where that asks for no order that is not asked for anyhow: backward reads a layer's
weight, but not its bias; it comes before the step for the sake of the gradients in either case.

What tasks declare the memory of is one state, by the name that they gave it. What it asks for does
not count when others are put together: a plan may allow it to be stale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from swpipe.core.effects import Effects, Location, conflicts
from swpipe.inference.declared import DECLARED
from swpipe.inference.orders import Edge, Orders, edge_of
from swpipe.inference.slots import Slot
from swpipe.inference.uses import Use, Uses

Pattern: TypeAlias = tuple[Use, ...]


def group(uses: Mapping[str, Uses]) -> dict[str, tuple[Slot, ...]]:
    """State to the slots that it stands for; each slot that any task touches is in one."""
    alike: dict[tuple[str, str], dict[Pattern, list[Slot]]] = defaultdict(dict)
    named: dict[str, tuple[Slot, ...]] = {}
    for slot in sorted({slot for of_task in uses.values() for slot in of_task.slots}):
        if slot.kind == DECLARED:
            named[slot.root] = (*named.get(slot.root, ()), slot)
            continue
        pattern = tuple(of_task.slots.get(slot, Use()) for of_task in uses.values())
        alike[slot.root, slot.kind].setdefault(pattern, []).append(slot)
    orders = _orders(uses, (pattern for patterns in alike.values() for pattern in patterns))
    for (root, kind), patterns in alike.items():
        groups = list(patterns.values())
        union = tuple(_union(of_task) for of_task in zip(*patterns, strict=True))
        if kind and all(orders.implies(edge) for edge in _edges(tuple(uses), union)):
            groups = [sorted(slot for slots in groups for slot in slots)]
        for slots in groups:
            for name in _names(root, kind, slots, alone=len(groups) == 1):
                if name not in named:
                    named[name] = tuple(slots)
                    break
    return named


def _union(uses: Iterable[Use]) -> Use:
    uses = tuple(uses)
    return Use(any(use.reads for use in uses), any(use.writes for use in uses))


def _orders(uses: Mapping[str, Uses], patterns: Iterable[Pattern]) -> Orders:
    """What is asked for by attributes, and by every slot on its own."""
    tasks = tuple(uses)
    orders = Orders(tasks)
    edges = {edge for pattern in set(patterns) for edge in _edges(tasks, pattern)}
    edges |= {edge_of(conflict) for conflict in conflicts(effects_of(uses, {}))}
    orders.missing(edges)
    return orders


def _edges(tasks: Sequence[str], pattern: Pattern) -> Iterator[Edge]:
    """The order that one state asks for which tasks use so."""
    place = frozenset({Location("it", True)})
    table = {
        task: Effects(place if use.reads else frozenset(), place if use.writes else frozenset())
        for task, use in zip(tasks, pattern, strict=True)
    }
    return (edge_of(conflict) for conflict in conflicts(table))


def _names(root: str, kind: str, slots: Sequence[Slot], *, alone: bool) -> Iterable[str]:
    """What a group might be called, the best first; the last is no other group's."""
    if len(slots) == 1:
        yield slots[0].name
    if alone and kind:
        yield f"{root} {kind}"
    prefix = _common([slot.name for slot in slots])
    if prefix and prefix != root and len(slots) > 1:
        yield f"{prefix} {kind}".strip()
    yield f"{slots[0].name} and {len(slots) - 1} more"
    yield " + ".join(slot.name for slot in slots)


def _common(names: Sequence[str]) -> str:
    """The dotted parts with which all names begin."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(alike[0] for alike in takewhile(lambda part: len(set(part)) == 1, parts))


def effects_of(
    uses: Mapping[str, Uses], states: Mapping[str, tuple[Slot, ...]]
) -> dict[str, Effects]:
    """Task to what it reads and writes, in serial order; without slots that are in no state."""
    state_of = {slot: name for name, slots in states.items() for slot in slots}
    table = {}
    for task, of_task in uses.items():
        places = [(Location(name, False), use) for name, use in of_task.attributes.items()]
        places += [
            (Location(state_of[slot], True), use)
            for slot, use in of_task.slots.items()
            if slot in state_of
        ]
        table[task] = Effects(
            frozenset(place for place, use in places if use.reads),
            frozenset(place for place, use in places if use.writes),
        )
    return table
