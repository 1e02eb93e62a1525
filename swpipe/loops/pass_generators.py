"""The random generators that matter to a loop: the default ones, and those that its loader has."""

from __future__ import annotations

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

_TOLD = {"python": "Python's default generator", "numpy": "numpy's default generator"}


class PassGenerators:
    """Reads and sets their states, as numbers, strings and tensors.

    Args:
        loader: The loader.
        device: Whose default generators count, beside the CPU's.
    """

    def __init__(self, loader: Any, device: Device) -> None:
        self._places = own_generators(loader)
        self._device = device
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    @property
    def own(self) -> frozenset[str]:
        """Names of those that the loader, its samplers and its dataset have."""
        return frozenset(self._places)

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

    def write(self, states: Mapping[str, Any]) -> None:
        """Set what ``read`` returned; generators of devices that are not here are left out."""
        torchs = {n.removeprefix(_TORCHS): s.cpu() for n, s in states.items() if _is_torchs(n)}
        self._device.set_generator_states(torchs)
        for name in states.keys() - {f"{_TORCHS}{device}" for device in torchs}:
            if (generator := self._generator(name)) is not None:
                _set(generator, states[name])


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


def told_names(names: Iterable[str]) -> str:
    """What a message calls these generators."""
    torchs = "torch's default generators"
    words = (torchs if _is_torchs(one) else _TOLD.get(one, one) for one in sorted(names))
    return listed([*dict.fromkeys(words)])
