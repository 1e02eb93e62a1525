"""The random generators that matter to a loop: the default ones, and those of its loader."""

from __future__ import annotations

import ctypes
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swpipe._engine.randomness import GeneratorAccess, TaskSeeds, this_thread
from swpipe._engine.waiting import ProgressCounter
from swpipe._values.generators import NUMPY, PYTHON, TORCH
from swpipe.core.loaders import own_generators
from swpipe.core.messages import listed
from swpipe.device import Device

States = dict[str, Any]
"""The states of generators, by name; torch's default ones are "torch cpu", "torch cuda:0"."""

_TORCHS = "torch "

_HOST = f"{_TORCHS}cpu"

_WORDS = {"python": PYTHON, "numpy": NUMPY}


class PassGenerators:
    """Reads and sets the states of generators, as numbers, strings and tensors.

    Attributes:
        defaults: The names of the default generators on the host.
        own: The names of the generators that the loader, its samplers and its dataset have.

    Args:
        loader: The loader.
        device: The device whose default generators count, beside the CPU's.
    """

    defaults = frozenset([_HOST, *_WORDS])

    def __init__(self, loader: Any, device: Device) -> None:
        self._places = own_generators(loader)
        self.own = frozenset(self._places)
        self._device = device
        self._known = self.own | self.defaults
        self._names = self._known | self._of_devices().keys()
        # By name: the mark and the state that were read last.
        self._last: dict[str, tuple[bytes | None, Any]] = defaultdict(lambda: (None, None))
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep tasks on other threads from using the default generators within the block."""
        # A task that already has access on this thread would wait for itself.
        return nullcontext() if this_thread.access is not None else self._access.exclusive()

    def _generator(self, name: str) -> Any:
        """Return a generator of the host by name; None if there is none, or numpy is not loaded."""
        if name in self._places:
            return getattr(*self._places[name])
        numpy: Any = sys.modules.get("numpy.random")
        # The module's function is a method of the default generator.
        numpys = None if numpy is None else numpy.random.__self__
        return {_HOST: torch.default_generator, "python": _PYTHONS, "numpy": numpys}.get(name)

    def read(self, names: Collection[str] | None = None) -> States:
        """Return the current states, of all generators or of the named ones.

        A default generator of the host that was not used since the last call gives the same object
        as before, within some microseconds.
        """
        names = self._names if names is None else names
        devices: States = {}
        # The generators of accelerators are read only if a name asks for one: it takes longer.
        if not self._known.issuperset(names):
            devices = self._of_devices()
        states = {}
        for name in names:
            state = self._state(name) if name in self._known else devices.get(name)
            if state is not None:
                states[name] = state
        return states

    def _of_devices(self) -> States:
        states = self._device.generator_states()
        return {f"{_TORCHS}{device}": state for device, state in states.items()}

    def _state(self, name: str) -> Any:
        """Return the state of a generator of the host; None if there is none of that name."""
        last_mark, last = self._last[name]
        mark = _mark(name, last)
        if mark is not None and mark == last_mark:
            return last
        generator = self._generator(name)
        state = None if generator is None else _state_of(generator)
        # If another thread has used the generator since, the mark does not belong to this state.
        self._last[name] = mark if mark == _mark(name, state) else None, state
        return state

    def write(self, states: Mapping[str, Any]) -> None:
        """Set the states that ``read`` returned, except those of devices that are not here."""
        torchs = {}
        for name, state in states.items():
            if _is_torchs(name):
                torchs[name.removeprefix(_TORCHS)] = state.cpu()
            elif (generator := self._generator(name)) is not None:
                _set(generator, state)
        self._device.set_generator_states(torchs)


def _mark(name: str, state: Any) -> bytes | None:
    """Return bytes that change at each use of a generator after a state; None if there are none.

    Numpy's generator may hold a normal number in reserve, whose use changes none of its bits.
    """
    # RandomState draws normal numbers in pairs: "has_gauss" says that one is in reserve.
    reserve = name == "numpy" and state and state.get("has_gauss")
    return None if reserve or name not in _MARKS else _MARKS[name]()


_STATE_BYTES = 625 * 4
"""Bytes of the Mersenne twister in Python and numpy: 624 numbers, and the place among them."""

_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]


def _torchs_mark() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _pythons_mark() -> bytes | None:
    """Return the bits of Python's generator; None if it has a normal number in reserve.

    The use of that number changes no bits.
    """
    if _OFFSET and _PYTHONS.gauss_next is None:
        return ctypes.string_at(id(_PYTHONS) + _OFFSET, _STATE_BYTES)
    return None


def _numpys_mark() -> bytes | None:
    """Return the bits of numpy's generator; empty if numpy is not loaded."""
    if (numpy := sys.modules.get("numpy.random")) is None:
        return b""
    bits = numpy.get_bit_generator()
    # numpy.random.set_bit_generator may have put another kind in place of the Mersenne twister.
    if type(bits).__name__ != "MT19937":
        return None
    return ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES)


_MARKS = {_HOST: _torchs_mark, "python": _pythons_mark, "numpy": _numpys_mark}


def _offset_of_state() -> int:
    """Return the offset of the state in CPython's generator object; 0 if it is not known.

    ``getstate`` takes 15 us to copy this state. The state begins behind the object's head, with
    the place. A build with another layout is detected, because the numbers differ.
    """
    _, (*numbers, place), _ = random.getstate()
    head = object.__basicsize__
    if random.Random.__basicsize__ < head + _STATE_BYTES:
        return 0
    there = (ctypes.c_uint32 * 625).from_address(id(_PYTHONS) + head)
    return head if [*there] == [place, *numbers] else 0


_OFFSET = _offset_of_state()


def _is_torchs(name: str) -> bool:
    return name.startswith(_TORCHS)


def is_default(name: str) -> bool:
    """Return whether a generator is a default one, which the whole process shares."""
    return _is_torchs(name) or name in _WORDS


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    # numpy's Generator has its state in a bit generator; the older RandomState has get_state().
    has_bits = hasattr(generator, "bit_generator")
    return _plain(generator.bit_generator.state if has_bits else generator.get_state(legacy=False))


def _plain(state: Any) -> Any:
    """Return a state of numpy's with lists in place of arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        # setstate() takes tuples only, and a file may have turned them into lists.
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the generators in both mappings whose states differ."""
    # An unused generator gives the same object again, so `is` settles most of them.
    return frozenset(
        name
        for name, state in after.items()
        if name in before and before[name] is not state and _differ(before[name], state)
    )


def _differ(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return not torch.equal(state, other)
    return bool(state != other)


def names_in_words(names: Iterable[str]) -> str:
    """Return the words for these generators in a message."""
    words = (TORCH if _is_torchs(name) else _WORDS.get(name, name) for name in sorted(names))
    return listed([*dict.fromkeys(words)])
