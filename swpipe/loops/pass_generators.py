"""The random generators that matter to a loop: the default ones, and those of its loader."""

from __future__ import annotations

import ctypes
import random
import sys
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
        on_host: Both.

    Args:
        loader: The loader.
        device: The device whose default generators count, beside the CPU's.
    """

    defaults = frozenset([_HOST, *_WORDS])

    def __init__(self, loader: Any, device: Device) -> None:
        self._places = own_generators(loader)
        self.own = frozenset(self._places)
        self._device = device
        self.on_host = self.own | self.defaults
        self._names = self.on_host | self._of_devices().keys()
        # The states of the default generators that were read last, and their marks.
        self._last: States = {}
        self._marks: dict[str, object] = {}
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
        if not names:
            return {}
        # The common case, at each pull: the same object as before if nothing was used.
        if names is self.on_host and not self.own:
            return self._of_defaults()
        host = self.on_host.intersection(names)
        # To read one state takes as long as to look for a change in all of them.
        states = self._of_defaults().copy() if host >= self.defaults else {}
        for name in host - states.keys():
            generator = self._generator(name)
            if generator is not None:
                states[name] = _state_of(generator)
        # The generators of accelerators are read only if a name asks for one: it takes longer.
        if not self.on_host.issuperset(names):
            states = self._of_devices() | states
        return {name: states[name] for name in names if name in states}

    def _of_devices(self) -> States:
        states = self._device.generator_states()
        return {f"{_TORCHS}{device}": state for device, state in states.items()}

    def _of_defaults(self) -> States:
        """Return the states of the default generators of the host; numpy's only if it is loaded."""
        marks = self._marks_now()
        if marks != self._marks:
            known = self._marks.items()
            for name, mark in marks.items():
                if (name, mark) not in known:
                    self._last = {**self._last, name: _state_of(self._generator(name))}
            # If another thread has used a generator since, its mark does not belong to its state.
            self._marks = dict(marks.items() & self._marks_now().items())
        return self._last

    def _marks_now(self) -> dict[str, object]:
        """Return a mark for each default generator of the host, which changes at each use.

        To read all states takes 36 us. The mark of a Mersenne twister is its place among its 624
        numbers, and the numbers next to the place, which are others after 624 draws. Where a use
        may change no bits, a new object is the mark: the generators of numpy and Python may hold a
        normal number in reserve.
        """
        state = torch.default_generator.get_state()
        marks: dict[str, object] = {_HOST: ctypes.string_at(state.data_ptr(), state.nbytes)}
        has_bits = _OFFSET and _PYTHONS.gauss_next is None
        begin = id(_PYTHONS) + _OFFSET
        marks["python"] = ctypes.string_at(begin, _MARK_BYTES) if has_bits else object()
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            bits = numpy.get_bit_generator()
            # numpy.random.set_bit_generator may have put another kind in place of the Mersenne
            # twister. RandomState draws normal numbers in pairs: "has_gauss" is the reserve.
            reserve = self._last.get("numpy", {}).get("has_gauss")
            has_bits = type(bits).__name__ == "MT19937" and not reserve
            end = bits.ctypes.state_address + _STATE_BYTES
            mark = ctypes.string_at(end - _MARK_BYTES, _MARK_BYTES) if has_bits else object()
            marks["numpy"] = mark
        return marks

    def write(self, states: Mapping[str, Any]) -> None:
        """Set the states that ``read`` returned, except those of devices that are not here."""
        torchs = {}
        for name, state in states.items():
            if _is_torchs(name):
                torchs[name.removeprefix(_TORCHS)] = state.cpu()
            elif (generator := self._generator(name)) is not None:
                _set(generator, state)
        self._device.set_generator_states(torchs)


_STATE_BYTES = 625 * 4
"""Bytes of a Mersenne twister: in Python the place and 624 numbers, in numpy the place is last."""

_MARK_BYTES = 8 * 4
"""Bytes of the place and seven numbers."""

_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]


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
    if before is after:
        return frozenset()
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
