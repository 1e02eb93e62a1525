"""What a loader keeps from pass to pass: its generators, counters and the like, to be saved.

A new process makes the loader anew, so a state has what differs from the loader as it was made, and
the states of all generators, by their names in the loader's code. What a state does not have is set
back to what it was then, since batches may have been pulled before the state is loaded.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from swpipe._state.kinds import CONTAINERS, is_array
from swpipe._state.reach import reach_of
from swpipe._state.reached import Reach
from swpipe._tensors.stateful import PLAIN, has_state_dict, is_generator
from swpipe.core.messages import listed
from swpipe.inference.loader_code import reaching
from swpipe.tuning.accelerate_loader import AccelerateLoader
from swpipe.tuning.plain_values import MAX_ITEMS, made_from, plain, set_generator
from swpipe.tuning.reached_values import ABSENT, ReachedValue, ReachedValues, fill, items_of, same

MAX_BYTES = 2**20
"""Larger arrays are not read."""


class LoaderValues:
    """Made before the loader is begun. What has a state of its own is left out.

    Attributes:
        at_start: What a state has of the beginning of the pass: name to plain data.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        loader = loader.prepared if isinstance(loader, AccelerateLoader) else loader
        self._values: dict[str, _Value] = {}
        if not has_state_dict(loader) or isinstance(loader, DataLoader):
            self._reach = reach_of(reaching(loader))  # ids stay valid
            self._values = _values_in(self._reach, has_state_dict(loader))
        self._made = self._read()
        self.begin()

    def begin(self, saved: Mapping[str, Any] | None = None) -> None:
        """A pass begins, where ``at_start`` was this.

        Raises:
            ValueError: The loader has no such value, or has one that cannot be set back.
        """
        if saved is not None:
            self._set_back(saved)
        self._begun = self._gone_on = self._read()
        self.at_start, self._missing = self._plain(self._changed(self._made))

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """The batches that were handed out are skipped, after which ``in_pass`` was this."""
        made_for_pass = {
            name
            for name in self._changed(self._begun)
            if self._values[name].is_attribute and not isinstance(self._values[name].read(), PLAIN)
        }
        for name in saved.keys() - made_for_pass:
            self._values[name].load(saved[name])
        self._gone_on = self._read()

    def set_since(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The same, with what was set since the pass was gone on with, such as an epoch."""
        new = self._changed(self._gone_on)
        now, _ = self._plain(new)
        return {**saved, **{name: now[name] for name in new & now.keys()}}

    def in_pass(self) -> dict[str, Any]:
        """What has changed in the pass."""
        return self._plain(self._changed(self._begun))[0]

    def check(self) -> None:
        """Refuse to save what a state cannot have of the beginning of the pass.

        Raises:
            RuntimeError: There is something.
        """
        self._check(self._missing)

    def between_passes(self, check: bool) -> dict[str, Any]:
        """What a new pass would begin with.

        Raises:
            RuntimeError: The state would lack something, and ``check``.
        """
        found, missing = self._plain(self._changed(self._made))
        if check:
            self._check(missing)
        return found

    def _read(self) -> dict[str, Any]:
        return {name: one.read() for name, one in self._values.items()}

    def _changed(self, before: Mapping[str, Any]) -> set[str]:
        now = self._read()
        return {name for name, then in before.items() if not same(then, now[name])}

    def _plain(self, changed: Collection[str]) -> tuple[dict[str, Any], set[str]]:
        """What a state has of the values, and names of what it cannot have."""
        found, missing = dict[str, Any](), set[str]()
        for name, one in self._values.items():
            if name in changed or isinstance(one, _Generator):
                try:
                    found[name] = one.data()
                except TypeError:
                    if not one.is_made_on_demand(self._made[name]):
                        missing.add(name)
        return found, missing

    def _check(self, missing: set[str]) -> None:
        iterators = {
            n for n, now in self._read().items() if now is self._begun[n] and _goes_on(now)
        }
        if missing | iterators:
            raise RuntimeError(
                f"the loader keeps {listed(sorted(missing | iterators), most=3)} from one pass to "
                "the next, which a state cannot have: keep numbers, strings, tensors, random "
                "generators and lists of these, or give the loader state_dict and load_state_dict; "
                "state_dict(check=False) saves without"
            )

    def _set_back(self, saved: Mapping[str, Any]) -> None:
        if unknown := saved.keys() - self._values.keys():
            raise ValueError(
                f"the state has {listed(sorted(unknown), most=3)} of the loader, and this loader "
                "does not: resume with one that is made in the same way"
            )
        for name in self._changed(self._made) - saved.keys():
            write = self._values[name].write
            if write is None:
                raise ValueError(
                    f"{name} of the loader was modified before the state was loaded, and cannot be "
                    "set back: let the loader make it anew for each pass"
                )
            write(self._made[name])
        for name, data in saved.items():
            self._values[name].load(data)


class _Value:
    """An attribute, a variable or an item; a subclass has what has no name in its holder."""

    is_attribute = True

    def __init__(self, holder: Any, one: ReachedValue) -> None:
        self.holder, self.name = holder, one.name
        self.read, self.write = one.read, one.write

    def data(self) -> Any:
        """What a state has; raises TypeError if it is no plain data."""
        if self.write is None:
            raise TypeError("not all of it is read")
        return plain(self.read())

    def load(self, data: Any) -> None:
        """Make it what ``data`` returned."""
        if self.write is None:
            raise ValueError(f"{self.name} of the loader is larger than it was in the saved state")
        self.write(made_from(data))

    def is_made_on_demand(self, made: Any) -> bool:
        """Whether the loader makes it again: there was nothing, or it is a pass's iterator."""
        return made is None or made is ABSENT or _goes_on(self.read())


class _Generator(_Value):
    is_attribute = False

    def data(self) -> Any:
        return plain(self.holder)

    def load(self, data: Any) -> None:
        set_generator(self.holder, data)


class _Container(_Value):
    is_attribute = False

    def __init__(self, holder: Any, one: ReachedValue) -> None:
        super().__init__(holder, one)
        self.read = self._items
        self.write = partial(fill, holder) if len(holder) <= MAX_ITEMS else None

    def _items(self) -> tuple[Any, ...]:
        return items_of(self.holder, MAX_ITEMS)

    def is_made_on_demand(self, made: Any) -> bool:
        """A cache: nothing that was there has another value."""
        size, now = made[0], self._items()
        if isinstance(self.holder, dict):
            return same(made[1:], now[1 : len(made)])
        pairs = zip(made[1:], now[1:], strict=False)
        return size == now[0] and all(then is None or same(then, item) for then, item in pairs)


class _Array(_Value):
    is_attribute = False

    def __init__(self, holder: Any, one: ReachedValue) -> None:
        super().__init__(holder, one)
        view = memoryview(holder)
        if view.c_contiguous and not view.readonly and view.format != "O":
            self.read, self.write = self._bytes, self._fill

    def _bytes(self) -> bytes:
        return bytes(memoryview(self.holder).cast("B"))

    def _fill(self, content: bytes) -> None:
        memoryview(self.holder).cast("B")[:] = content


class _Tensor(_Value):
    is_attribute = False

    def data(self) -> Any:
        return plain(self.holder)

    def load(self, data: Any) -> None:
        with torch.no_grad():
            self.holder.copy_(made_from(data))


def _values_in(reach: Reach, stateful: bool) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    with_state = stateful and any(map(has_state_dict, reach.holders.values()))
    for place, one in ReachedValues([reach], max_bytes=MAX_BYTES).values.items():
        holder = reach.holders[place.holder]
        kind = _Value if place.name else _kind_of(holder)
        if kind is None or (stateful and has_state_dict(holder)):
            continue
        if with_state and kind in (_Container, _Array, _Tensor):  # perhaps of what has a state
            continue
        called = f"{one.name!r} of {type(holder).__name__}" if place.name else repr(one.name)
        number = sum(name.partition(" #")[0] == called for name in found)
        found[f"{called} #{number + 1}" if number else called] = kind(holder, one)
    return found


def _kind_of(holder: Any) -> type[_Value] | None:
    """What there is to save of a holder; None for what others save, or nobody can."""
    if is_generator(holder):
        return None if _is_default(holder) else _Generator
    if isinstance(holder, Tensor):
        return None if holder.requires_grad else _Tensor
    if isinstance(holder, CONTAINERS):
        return _Container
    return _Array if is_array(holder) else None


def _is_default(generator: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    numpys = getattr(numpy.rand, "__self__", None) if numpy else None
    pythons = getattr(random.random, "__self__", None)
    return any(generator is one for one in (torch.default_generator, pythons, numpys))


def _goes_on(value: Any) -> bool:
    """Whether a value is an iterator, but no file: those are read anywhere."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
