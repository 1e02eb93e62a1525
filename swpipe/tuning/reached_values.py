"""Values that code can reach outside the context, read to see whether somebody has changed them.

    names in closures, globals and objects   which object each has
    lists, dicts, sets, deques               their items; of large ones the length and the ends
    generators of random numbers             their states
    events of ``threading``                  whether they are set
    arrays                                   their bytes
    tensors and modules                      version counters

Of each kind the nearest ``MOST`` are read. Code of the objects is not run.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._state.discovery import content_of, is_generator
from swpipe.inference.generators import state_of
from swpipe.inference.reach import PlaceId, Reach

MOST = 32
MAX_ITEMS = 64
MAX_BYTES = 2**14
"""Larger arrays are not read."""

_ABSENT = object()


class ReachedValue(NamedTuple):
    """A value.

    Attributes:
        name: What messages call it.
        read: Returns what it is now, as something that does not change.
    """

    name: str
    read: Callable[[], Any]


class ReachedValues:
    """The values that some code can reach."""

    def __init__(self, reaches: Iterable[Reach]) -> None:
        self._values = {place: one for reach in reaches for place, one in _values_in(reach)}

    def read(self) -> dict[PlaceId, Any]:
        """What they are now."""
        return {place: one.read() for place, one in self._values.items()}

    def changed(self, before: dict[PlaceId, Any]) -> dict[PlaceId, str]:
        """Places of those that are not what they were, with their names."""
        return {
            place: self._values[place].name
            for place, then in before.items()
            if not _same(then, self._values[place].read())
        }


def _values_in(reach: Reach) -> Iterator[tuple[PlaceId, ReachedValue]]:
    named = [place for place in reach.places if place.name]
    containers = [place for place in reach.places if not place.name]
    for place in named[:MOST]:
        holder = reach.holders[place.holder]
        yield place, ReachedValue(reach.places[place], partial(_named, holder, place.name))
    for place in containers[:MOST]:
        holder = reach.holders[place.holder]
        yield place, ReachedValue(reach.places[place], partial(_items, holder))
    for number, one in list(reach.holders.items()):
        if isinstance(one, threading.Event):
            yield PlaceId(number, ""), ReachedValue("a threading.Event", one.is_set)
        elif _is_small_array(one):
            yield PlaceId(number, ""), ReachedValue("an array", one.tobytes)
    for number, names in list(reach.wholes.items())[:MOST]:
        one = reach.holders[number]
        name = min(names) or type(one).__name__
        if is_generator(one) or isinstance(one, random.Random):
            yield PlaceId(number, ""), ReachedValue(name, partial(state_of, one))
        elif isinstance(one, Tensor | torch.nn.Module):
            yield PlaceId(number, ""), ReachedValue(name, partial(_versions, one))


def _named(holder: Any, name: str) -> Any:
    """What a namespace, an object or a closure's cell has under a name."""
    if isinstance(holder, CellType):
        return content_of(holder, _ABSENT)
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return names.get(name, _ABSENT)


def _items(container: Any) -> tuple[Any, ...]:
    size = len(container)
    if size <= MAX_ITEMS:
        values = container.values() if isinstance(container, dict) else ()
        return (size, *container, *values)
    return (size, container[0], container[-1]) if isinstance(container, list | deque) else (size,)


def _is_small_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= MAX_BYTES


def _versions(one: Tensor | torch.nn.Module) -> tuple[Any, ...]:
    """Version counters, and of a module also its mode."""
    if isinstance(one, Tensor):
        return () if one.is_inference() else (one._version,)
    tensors = [*one.parameters(), *one.buffers()]
    return (one.training, *(each._version for each in tensors if not each.is_inference()))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain ones; NaN equals itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool | int | float | complex | str | bytes) and repr(one) == repr(other)
