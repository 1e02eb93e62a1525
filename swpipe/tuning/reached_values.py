"""Values that code can reach outside the context: read to see whether they change, and set back.

    names in closures, globals and objects   which object each has
    lists, dicts, sets, deques               their items; of large ones the length and the ends
    generators of random numbers             their states
    events of ``threading``                  whether they are set; a change is not undone
    arrays                                   their bytes, likewise
    tensors and modules                      version counters, likewise

Of each kind the nearest ``MOST`` are read. Code of the objects is not run. What reaches a thread or
a queue may change at any time, so nothing of it is read.
"""

from __future__ import annotations

import pickle
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from types import CellType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._state.discovery import attributes_of, content_of
from swpipe._state.generators import NUMPY, PYTHON, TORCH, state_of
from swpipe._state.kinds import CONTAINERS, content_value, is_array
from swpipe._state.put_back import flat, refill
from swpipe._state.reached import PlaceId, Reach
from swpipe._tensors.stateful import is_generator
from swpipe.device import Device

MOST = 32
MAX_ITEMS = 64
MAX_BYTES = 2**14
"""Larger arrays are not read."""

_THREADED = (threading.Thread, Executor, queue.Queue, queue.SimpleQueue)
ABSENT = object()


class ReachedValue(NamedTuple):
    """A value.

    Attributes:
        name: What messages call it.
        read: Returns what it is now, as something that does not change.
        write: Makes it what ``read`` returned; None where this is not possible.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


class ReachedValues:
    """The values that some code can reach.

    Attributes:
        values: By place.

    Args:
        reaches: What the code can reach.
        others: More values.
        max_bytes: Larger arrays are not read.
    """

    def __init__(
        self,
        reaches: Iterable[Reach],
        others: Mapping[PlaceId, ReachedValue] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.values = {
            place: one
            for reach in reaches
            if not any(isinstance(holder, _THREADED) for holder in reach.holders.values())
            for place, one in _values_in(reach, max_bytes)
        }
        self.values |= others or {}

    def read(self) -> dict[PlaceId, Any]:
        """What they are now."""
        return {place: one.read() for place, one in self.values.items()}

    def changed(self, before: dict[PlaceId, Any]) -> dict[PlaceId, str]:
        """Places of those that are not what they were, with their names."""
        return {
            place: self.values[place].name
            for place, then in before.items()
            if place in self.values and not same(then, self.values[place].read())
        }


def _values_in(reach: Reach, max_bytes: int) -> Iterator[tuple[PlaceId, ReachedValue]]:
    named = [place for place in reach.places if place.name and place not in reach.inner]
    holders = {place: reach.holders[place.holder] for place in reach.places if not place.name}
    containers = [place for place, holder in holders.items() if isinstance(holder, CONTAINERS)]
    arrays = [place for place, holder in holders.items() if is_array(holder)]
    for place in named[:MOST]:
        holder = reach.holders[place.holder]
        read = partial(_named, holder, place.name)
        yield place, ReachedValue(reach.places[place], read, partial(_set, holder, place.name))
    for place in containers[:MOST]:
        holder = reach.holders[place.holder]
        write = partial(fill, holder) if isinstance(holder, list | dict | set) else None
        yield place, ReachedValue(reach.places[place], partial(items_of, holder), write)
    for place in arrays[:MOST]:
        if memoryview(holders[place]).nbytes <= max_bytes:
            yield place, ReachedValue(reach.places[place], partial(content_value, holders[place]))
    for number, one in list(reach.holders.items()):
        if isinstance(one, threading.Event):
            yield PlaceId(number, ""), ReachedValue("a threading.Event", one.is_set)
    for number, names in list(reach.wholes.items())[:MOST]:
        one = reach.holders[number]
        name = min(names) or type(one).__name__
        if is_generator(one) or isinstance(one, random.Random):
            yield PlaceId(number, ""), ReachedValue(name, partial(state_of, one), _setter(one))
        elif isinstance(one, Tensor | torch.nn.Module):
            yield PlaceId(number, ""), ReachedValue(name, partial(_versions, one))


def _named(holder: Any, name: str) -> Any:
    """What a namespace, an object or a closure's cell has under a name."""
    if isinstance(holder, CellType):
        return content_of(holder, ABSENT)
    if _slot(holder, name) is not None:
        return attributes_of(holder).get(name, ABSENT)
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return names.get(name, ABSENT)


def _slot(holder: Any, name: str) -> MemberDescriptorType | None:
    """Where an object of a class with ``__slots__`` keeps an attribute."""
    cls = next((one for one in type(holder).__mro__ if name in vars(one)), object)
    member = vars(cls).get(name)
    # Members of types that are written in C may be read-only.
    slot = isinstance(member, MemberDescriptorType) and "__slots__" in vars(cls)
    return member if slot else None


def items_of(container: Any, most: int = MAX_ITEMS) -> tuple[Any, ...]:
    """Its length and items, of a dict keys and values in turn; of a larger one length and ends."""
    size = len(container)
    if size <= most:
        return (size, *flat(container))
    return (size, container[0], container[-1]) if isinstance(container, list | deque) else (size,)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, CellType):
        if value is ABSENT:
            del holder.cell_contents
        else:
            holder.cell_contents = value
    elif isinstance(holder, type):  # its names are read-only
        delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif (slot := _slot(holder, name)) is not None:
        slot.__delete__(holder) if value is ABSENT else slot.__set__(holder, value)
    else:
        names = holder if isinstance(holder, dict) else vars(holder)
        names.pop(name, None) if value is ABSENT else names.__setitem__(name, value)


def fill(container: Any, items: tuple[Any, ...]) -> None:
    """Give it the items that ``items_of`` returned, if that were all."""
    size, *rest = items
    if len(rest) < size:
        return
    pairs = zip(rest[::2], rest[1::2], strict=True) if isinstance(container, dict) else None
    refill(container, rest if pairs is None else dict(pairs))


def _setter(generator: Any) -> Callable[[Any], object]:
    if isinstance(generator, torch.Generator):
        return lambda state: generator.set_state(_tensor(state))
    if isinstance(generator, random.Random):
        return generator.setstate
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return lambda state: setattr(bits, "state", pickle.loads(state))


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def default_generators_of(device: Device, names: Collection[str]) -> dict[PlaceId, ReachedValue]:
    """The default random generators of these names, as effects name them."""

    def read_torch() -> tuple[bytes, ...]:
        return tuple(state.numpy().tobytes() for state in device.generator_states().values())

    def write_torch(states: tuple[bytes, ...]) -> None:
        names = device.generator_states()
        device.set_generator_states(dict(zip(names, map(_tensor, states), strict=True)))

    known: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        TORCH: (read_torch, write_torch),
        PYTHON: (
            lambda: pickle.dumps(random.getstate()),
            lambda state: random.setstate(pickle.loads(state)),
        ),
    }
    if numpy := sys.modules.get("numpy.random"):
        known[NUMPY] = (
            lambda: pickle.dumps(numpy.get_state()),
            lambda state: numpy.set_state(pickle.loads(state)),
        )
    return {PlaceId(0, name): ReachedValue(name, *known[name]) for name in names if name in known}


def _versions(one: Tensor | torch.nn.Module) -> tuple[Any, ...]:
    """Version counters, what requires gradients, and of modules also their mode."""
    if isinstance(one, Tensor):
        return _version(one)
    modes = (each.training for each in one.modules())
    return (*modes, *chain.from_iterable(map(_version, (*one.parameters(), *one.buffers()))))


def _version(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.requires_grad, *(() if tensor.is_inference() else (tensor._version,)))


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain ones; NaN equals itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool | int | float | complex | str | bytes) and repr(one) == repr(other)


def counters_of(value: Any) -> dict[PlaceId, ReachedValue]:
    """Numbers that an object of a library keeps, such as a progress bar around a loader."""
    names = [name for name, held in attributes_of(value).items() if type(held) is int]
    return {
        PlaceId(id(value), name): ReachedValue(
            name, partial(_named, value, name), partial(_set, value, name)
        )
        for name in names
    }
