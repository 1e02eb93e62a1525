"""The random generators that matter to a loop: the default ones, and those that its loader has."""

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
from swpipe.core.loaders import own_generators
from swpipe.core.messages import listed
from swpipe.device import Device

States = dict[str, Any]
"""Name of a generator to its state. Torch's default ones are named "torch cpu", "torch cuda:0"."""

_TORCHS = "torch "

_HOST = f"{_TORCHS}cpu"

_TOLD = {"python": "Python's default generator", "numpy": "numpy's default generator"}


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
        self._numpy: tuple[bytes, Any] = b"", None
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    def named(self, generators: Collection[Any]) -> set[str]:
        """Names of some of these."""
        return {n for n in self._places if any(self._generator(n) is one for one in generators)}

    def exclusive(self) -> AbstractContextManager[None]:
        """Within the block no task on another thread uses the default ones."""
        return nullcontext() if this_thread.access is not None else self._access.exclusive()

    def _generator(self, name: str) -> Any:
        """Any but torch's default ones; None if there is none of that name, or no numpy."""
        if name in self._places:
            owner, known = self._places[name]
            return getattr(owner, known)
        module: Any = {"python": random, "numpy": sys.modules.get("numpy.random")}.get(name)
        return None if module is None else module.random.__self__  # the generator's method

    def read(self, names: Collection[str] | None = None) -> States:
        """The states now, of all or of some."""
        found: States = {}
        if names is None or any(map(_is_torchs, names)):
            torchs = self._device.generator_states()
            found = {f"{_TORCHS}{device}": state for device, state in torchs.items()}
        for name in (*found, *_TOLD, *self._places) if names is None else names:
            if not _is_torchs(name) and (generator := self._generator(name)) is not None:
                found[name] = _state_of(generator)
        return found if names is None else {n: one for n, one in found.items() if n in names}

    def look(self, names: Collection[str]) -> dict[str, Any]:
        """What tells that one of them was used, in some microseconds; it cannot be set back."""
        found: dict[str, Any] = {}
        for name in names:
            if name == _HOST:
                found[name] = _bytes_of(torch.default_generator.get_state())
            elif name == "python":
                found[name] = _python_look()
            elif name == "numpy":
                if numpy := sys.modules.get("numpy.random"):
                    found[name] = self._look_at_numpy(numpy)
            elif (generator := self._generator(name)) is not None:
                found[name] = _state_of(generator)
        return found

    def _look_at_numpy(self, numpy: Any) -> tuple[bytes, Any]:
        """The bytes of its state; and the whole of it, which takes 50 us, where these do not tell.

        The number that it has in reserve after a normal one is in no state of its bits.
        """
        bits = numpy.get_bit_generator()
        twister = type(bits).__name__ == "MT19937"
        there = ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES) if twister else b""
        if not there or there != self._numpy[0] or self._numpy[1].get("has_gauss"):
            self._numpy = there, self.read(["numpy"])["numpy"]
        return self._numpy

    def write(self, states: Mapping[str, Any]) -> None:
        """Set what ``read`` returned; generators of devices that are not here are left out."""
        torchs = {n.removeprefix(_TORCHS): s.cpu() for n, s in states.items() if _is_torchs(n)}
        self._device.set_generator_states(torchs)
        for name in states.keys() - {f"{_TORCHS}{device}" for device in torchs}:
            if (generator := self._generator(name)) is not None:
                _set(generator, states[name])


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


_STATE_BYTES = 625 * 4
"""Of the Mersenne twister in Python and numpy: 624 numbers, and the place among them."""

_PYTHONS: Any = random.random.__self__  # type: ignore[attr-defined]


def _python_look() -> Any:
    if _OFFSET:
        there = ctypes.string_at(id(_PYTHONS) + _OFFSET, _STATE_BYTES)
        return there, _PYTHONS.gauss_next
    return random.getstate()


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
    both = before.keys() & after.keys()
    return frozenset(name for name in both if _differ(before[name], after[name]))


def _differ(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


def names_told(names: Iterable[str]) -> str:
    """What a message calls these generators."""
    torchs = "torch's default generators"
    words = (torchs if _is_torchs(one) else _TOLD.get(one, one) for one in sorted(names))
    return listed([*dict.fromkeys(words)])
