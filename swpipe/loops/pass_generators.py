"""The random generators that matter to a loop: the default ones, and those that its loader has."""

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
"""Name of a generator to its state. Torch's default ones are named "torch cpu", "torch cuda:0"."""

_TORCHS = "torch "

_HOST = f"{_TORCHS}cpu"

_TOLD = {"python": PYTHON, "numpy": NUMPY}


class PassGenerators:
    """Reads and sets their states, as numbers, strings and tensors.

    Attributes:
        defaults: Names of the default ones on the host.
        own: Names of those that the loader, its samplers and its dataset have.

    Args:
        loader: The loader.
        device: Whose default generators count, beside the CPU's.
    """

    defaults = frozenset([_HOST, *_TOLD])

    def __init__(self, loader: Any, device: Device) -> None:
        self._places = own_generators(loader)
        self.own = frozenset(self._places)
        self._device = device
        self._known = self.own | self.defaults
        # By name, what was read last: the mark and the state.
        self._last: dict[str, tuple[bytes | None, Any]] = defaultdict(lambda: (None, None))
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    def named(self, generators: Collection[Any]) -> set[str]:
        """Names of some of these."""
        return {n for n in self._places if any(self._generator(n) is one for one in generators)}

    def exclusive(self) -> AbstractContextManager[None]:
        """Within the block no task on another thread uses the default ones."""
        return nullcontext() if this_thread.access is not None else self._access.exclusive()

    def _generator(self, name: str) -> Any:
        """Any but those of devices; None if there is none of that name, or no numpy."""
        if name in self._places:
            owner, known = self._places[name]
            return getattr(owner, known)
        if name == _HOST:
            return torch.default_generator
        module: Any = {"python": random, "numpy": sys.modules.get("numpy.random")}.get(name)
        return None if module is None else module.random.__self__  # the generator's method

    def read(self, names: Collection[str] | None = None) -> States:
        """Return the states now, of all or of some.

        The state of a default generator of the host that was not used since is the same object as
        before, and takes some microseconds.
        """
        devices: States = {}
        if names is None or not self._known.issuperset(names):
            found = self._device.generator_states()
            devices = {f"{_TORCHS}{device}": state for device, state in found.items()}
        states = {}
        for name in (*devices, *_TOLD, *self._places) if names is None else names:
            state = self._state(name) if name in self._known else devices.get(name)
            if state is not None:
                states[name] = state
        return states

    def marks(self) -> tuple[bytes | None, ...] | None:
        """Return what each use of a default generator changes, in less time than ``read`` takes.

        None if only ``read`` tells.
        """
        marks = tuple(map(self._mark, _MARKS))
        return None if self.own or None in marks else marks

    def _mark(self, name: str) -> bytes | None:
        """Return a generator's mark; None if it has none.

        To use the normal number that numpy has in reserve changes none of its bits.
        """
        reserve = name == "numpy" and self._last[name][1] and self._last[name][1].get("has_gauss")
        return None if reserve or name not in _MARKS else _MARKS[name]()

    def _state(self, name: str) -> Any:
        """Return the state of a generator of the host; None if there is none of that name."""
        mark = self._mark(name)
        last_mark, last = self._last[name]
        if mark is not None and mark == last_mark:
            return last
        generator = self._generator(name)
        state = None if generator is None else _state_of(generator)
        self._last[name] = None, state
        # Another thread may have used it since the mark was read.
        self._last[name] = mark if mark == self._mark(name) else None, state
        return state

    def write(self, states: Mapping[str, Any]) -> None:
        """Set what ``read`` returned; generators of devices that are not here are left out."""
        torchs = {n.removeprefix(_TORCHS): s.cpu() for n, s in states.items() if _is_torchs(n)}
        self._device.set_generator_states(torchs)
        for name in states.keys() - {f"{_TORCHS}{device}" for device in torchs}:
            if (generator := self._generator(name)) is not None:
                _set(generator, states[name])


_STATE_BYTES = 625 * 4
"""Of the Mersenne twister in Python and numpy: 624 numbers, and the place among them."""

_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]


def _torchs_mark() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _pythons_mark() -> bytes | None:
    """None where it has a normal number in reserve, whose use changes no bits."""
    if _OFFSET and _PYTHONS.gauss_next is None:
        return ctypes.string_at(id(_PYTHONS) + _OFFSET, _STATE_BYTES)
    return None


def _numpys_mark() -> bytes | None:
    """Empty where nobody has loaded it."""
    if (numpy := sys.modules.get("numpy.random")) is None:
        return b""
    bits = numpy.get_bit_generator()
    if type(bits).__name__ != "MT19937":
        return None
    return ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES)


_MARKS = {_HOST: _torchs_mark, "python": _pythons_mark, "numpy": _numpys_mark}


def _offset_of_state() -> int:
    """Where CPython's generator has its state, which ``getstate`` takes 15 us to copy; 0 unknown.

    It begins behind the object's head, by the place: in a build where it does not, none is found.
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
    """Whether it is one that all of a process shares."""
    return _is_torchs(name) or name in _TOLD


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    has_bits = hasattr(generator, "bit_generator")
    return _plain(generator.bit_generator.state if has_bits else generator.get_state(legacy=False))


def _plain(state: Any) -> Any:
    """A state of numpy, without its arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names of the generators that both have, and whose states differ."""
    return frozenset(
        name
        for name, state in after.items()
        if name in before and before[name] is not state and _differ(before[name], state)
    )


def _differ(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


def names_told(names: Iterable[str]) -> str:
    """What a message calls these generators."""
    words = (TORCH if _is_torchs(name) else _TOLD.get(name, name) for name in sorted(names))
    return listed([*dict.fromkeys(words)])
