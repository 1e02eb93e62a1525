"""Values of which each thread has its own: ``threading.local`` and context variables."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from swpipe._state.reached import Reach


def threads_values(reaches: Mapping[str, Reach]) -> dict[str, set[str]]:
    """Task to the paths of those that would be others if it ran on another thread.

    What only one task keeps in an object that was empty, such as a handle for each thread, would
    not; nor a context variable that no task sets, since all threads have the caller's value.
    """
    users: dict[int, dict[str, Reach]] = defaultdict(dict)
    for task, reach in reaches.items():
        for number in reach.owned:
            if isinstance(reach.holders[number], threading.local | ContextVar):
                users[number][task] = reach
    found: dict[str, set[str]] = {task: set() for task in reaches}
    for number, of_tasks in users.items():
        for task, reach in of_tasks.items() if _carries(number, of_tasks.values()) else ():
            found[task].add(reach.owned[number])
    return found


def _carries(number: int, users: Iterable[Reach]) -> bool:
    """Whether a value leads from the caller to a task, or from one task to another."""
    one, *others = users
    if isinstance(one.holders[number], ContextVar):
        return any(
            "set" in reach.taken(called)
            for reach in (one, *others)
            for called in reach.called.get(number, ())
        )
    return bool(others) or any(place.holder == number and place.name for place in one.places)
