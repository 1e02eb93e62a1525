"""Grouping of state items into few named states.

Items of one owner and kind that the same tasks write form one state. A task that reads one of them
is ordered with those writers in any case, so the state as a whole needs no order that its items
do not need one by one: backward reads a layer's weight, but not its bias, and comes before the step
that writes both. Items in declared memory form the declared state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from swpipe.core.effects import Effects, Location
from swpipe.inference.accesses import Accesses
from swpipe.inference.states import ATTRIBUTE, DECLARED, StateItem


def group(accesses: Accesses) -> dict[str, tuple[StateItem, ...]]:
    """Return, for each state, its items; each item that any task accesses is in one state."""
    alike: dict[tuple[str, str], dict[tuple[str, ...], list[StateItem]]] = defaultdict(dict)
    states: dict[str, tuple[StateItem, ...]] = {}
    for item in sorted(set[StateItem]().union(*accesses.values())):
        if item.kind == DECLARED:
            states[item.owner] = (*states.get(item.owner, ()), item)
        elif item.kind != ATTRIBUTE:
            # Same owner, kind and writers: one state. Readers may differ, see the module's
            # docstring.
            writers = tuple(t for t, touched in accesses.items() if touched.get(item, (0, 0))[1])
            alike[item.owner, item.kind].setdefault(writers, []).append(item)
    for (owner, kind), groups in alike.items():
        for items in groups.values():
            # The first name that no other state has; the last candidate lists all items and is
            # unique.
            names = _names(owner, kind, items, only=len(groups) == 1)
            states[next(name for name in names if name not in states)] = tuple(items)
    return states


def _names(owner: str, kind: str, items: Sequence[StateItem], *, only: bool) -> Iterator[str]:
    """Yield possible names of a group, the best first; the last one is unique.

    ``only`` says that the group has all items of the owner and kind.
    """
    if len(items) == 1:
        yield items[0].name
    if only and kind:
        yield f"{owner} {kind}"
    parts = zip(*(item.name.split(".") for item in items), strict=False)
    prefix = ".".join(same[0] for same in takewhile(lambda part: len(set(part)) == 1, parts))
    if prefix and prefix != owner and len(items) > 1:
        yield f"{prefix} {kind}".strip()
    yield f"{items[0].name} and {len(items) - 1} more"
    yield " + ".join(item.name for item in items)


def effects_of(
    accesses: Accesses, states: Mapping[str, tuple[StateItem, ...]]
) -> dict[str, Effects]:
    """Return the effects of each task, in serial order."""
    places = {item: Location(name, True) for name, items in states.items() for item in items}
    table = {}
    for task, touched in accesses.items():
        # Attributes belong to an iteration, states outlive it: Location's second argument.
        of_task = [(places.get(i) or Location(i.name, False), how) for i, how in touched.items()]
        table[task] = Effects(
            frozenset(place for place, access in of_task if access.reads),
            frozenset(place for place, access in of_task if access.writes),
        )
    return table
