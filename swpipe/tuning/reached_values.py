"""Values that code can reach outside the context, read and set one by one.

    names in closures, globals and objects   which object each has
    lists, dicts, sets, deques               their items
    generators of random numbers             their states
    events of ``threading``                  whether they are set
    arrays                                   their bytes
    tensors and modules                      version counters: a change is seen, and not undone

Of each kind the nearest ``MOST`` are read. Code of the objects is not run.
"""

from __future__ import annotations

import operator
import pickle
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._state.discovery import MAX_ITEMS, PLAIN, content_of, is_generator
from swpipe.device import Device
from swpipe.device.protocol import GeneratorStates
from swpipe.inference.generators import NUMPY, PYTHON, TORCH
from swpipe.inference.reach import PlaceId, Reach

MOST = 100
MAX_BYTES = 2**16
"""Larger arrays are not read."""

THREADED = (threading.Thread, Executor, queue.Queue, queue.SimpleQueue)
"""What reaches one of these may change at any time, from a thread of its own."""

_ABSENT = object()


class ReachedValue(NamedTuple):
    """A value.

    Attributes:
        name: What messages call it.
        read: Returns what it is now, as something that does not change.
        same: Whether two results of ``read`` are equal.
        write: Makes it what ``read`` returned; None where this is not possible.
        is_generator: Whether it is the state of a generator: who uses it also changes it.
    """

    name: str
    read: Callable[[], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any], None] | None
    is_generator: bool = False


def is_threaded(reach: Reach) -> bool:
    """Whether something in reach may be changed by a thread of its own."""
    return any(isinstance(one, THREADED) for one in reach.holders.values())


def values_in(reach: Reach) -> dict[PlaceId, ReachedValue]:
    """The values in reach, by where they are."""
    found: dict[PlaceId, ReachedValue] = {}
    named = [place for place in reach.places if place.name]
    containers = [place for place in reach.places if not place.name]
    for place in (*named[:MOST], *containers[:MOST]):
        holder, path = reach.holders[place.holder], reach.places[place]
        found[place] = attribute(holder, place.name, path) if place.name else _items(holder, path)
    for kind in (_events(reach), _arrays(reach), _wholes(reach)):
        found |= dict(kind[:MOST])
    return found


def default_generators_of(device: Device) -> dict[PlaceId, ReachedValue]:
    """The default random generators, as places named as in effects."""
    found: dict[str, tuple[Any, Any, Any]] = {
        TORCH: (device.generator_states, _same_states, device.set_generator_states),
        PYTHON: (random.getstate, operator.eq, random.setstate),
    }
    if numpy := sys.modules.get("numpy.random"):
        found[NUMPY] = (numpy.get_state, _same_arrays, numpy.set_state)
    return {PlaceId(0, name): ReachedValue(name, *each, True) for name, each in found.items()}


def attribute(holder: Any, name: str, path: str) -> ReachedValue:
    """What a namespace, an object or a closure's cell has under a name."""
    if isinstance(holder, CellType):
        return ReachedValue(
            path, partial(content_of, holder, _ABSENT), _same, partial(_set_cell, holder)
        )
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return ReachedValue(
        path, partial(names.get, name, _ABSENT), _same, partial(_set_name, holder, name)
    )


def _set_cell(cell: CellType, value: Any) -> None:
    if value is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _set_name(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, type):  # its names are read-only
        delattr(holder, name) if value is _ABSENT else setattr(holder, name, value)
        return
    names = holder if isinstance(holder, dict) else vars(holder)
    if value is _ABSENT:
        del names[name]
    else:
        names[name] = value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal ones without parts; NaN equals itself."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, PLAIN) and repr(one) == repr(other)


class _Items(NamedTuple):
    """The items of a container; of a large one its length and its ends."""

    length: int
    items: tuple[Any, ...]


def _items(container: Any, path: str) -> ReachedValue:
    def read() -> _Items:
        size = len(container)
        if size <= MAX_ITEMS:
            values = container.values() if isinstance(container, dict) else ()
            return _Items(size, (*container, *values))
        ends = (container[0], container[-1]) if isinstance(container, list | deque) else ()
        return _Items(size, ends)

    def write(value: _Items) -> None:
        if value.length > MAX_ITEMS:
            return
        if not isinstance(container, dict):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(value.items)
            return
        items = dict(zip(value.items[: value.length], value.items[value.length :], strict=True))
        if container.keys() != items.keys():
            container.clear()
        container.update(items)  # a loop over a dict may be under way, if the keys are the same

    return ReachedValue(path, read, _same_items, write)


def _same_items(one: _Items, other: _Items) -> bool:
    return one.length == other.length and all(map(_same, one.items, other.items))


def _events(reach: Reach) -> list[tuple[PlaceId, ReachedValue]]:
    found = [one for one in reach.holders.values() if isinstance(one, threading.Event)]
    return [
        (PlaceId(id(one), ""), ReachedValue("a threading.Event", one.is_set, operator.eq, None))
        for one in found
    ]


def _arrays(reach: Reach) -> list[tuple[PlaceId, ReachedValue]]:
    numpy = sys.modules.get("numpy")
    found = [
        one
        for one in reach.holders.values()
        if numpy is not None and isinstance(one, numpy.ndarray) and one.nbytes <= MAX_BYTES
    ]
    return [
        (PlaceId(id(one), ""), ReachedValue("an array", one.tobytes, operator.eq, None))
        for one in found
    ]


def _wholes(reach: Reach) -> list[tuple[PlaceId, ReachedValue]]:
    """Generators, modules and tensors."""
    found = []
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        name = min(names) or type(one).__name__
        if is_generator(one) or isinstance(one, random.Random):
            value = ReachedValue(name, *_generator(one), True)
        elif isinstance(one, Tensor | torch.nn.Module):
            value = ReachedValue(name, partial(_versions, one), operator.eq, None)
        else:
            continue
        found.append((PlaceId(number, ""), value))
    return sorted(found, key=lambda item: not item[1].is_generator)


def _generator(one: Any) -> tuple[Callable[[], Any], Callable[[Any, Any], bool], Any]:
    if isinstance(one, torch.Generator):
        return one.get_state, torch.equal, one.set_state
    if isinstance(one, random.Random):
        return one.getstate, operator.eq, one.setstate
    bits = getattr(one, "bit_generator", None) or one._bit_generator
    return lambda: bits.state, _same_bits, lambda state: setattr(bits, "state", state)


def _same_bits(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


def _same_states(one: GeneratorStates, other: GeneratorStates) -> bool:
    return all(torch.equal(state, other[device]) for device, state in one.items())


def _same_arrays(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[2:] == other[2:] and bool((one[1] == other[1]).all())


def _versions(one: Tensor | torch.nn.Module) -> list[int]:
    """Version counters, and of a module also its mode."""
    if isinstance(one, Tensor):
        return [] if one.is_inference() else [one._version]
    tensors = [*one.parameters(), *one.buffers()]
    return [one.training, *(each._version for each in tensors if not each.is_inference())]
