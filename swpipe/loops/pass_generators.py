"""The random generators that matter to a loop: the default ones, and those that its loader has."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swpipe._engine.randomness import GeneratorAccess, TaskSeeds, this_thread
from swpipe._engine.waiting import ProgressCounter
from swpipe.core.loaders import own_generators
from swpipe.core.messages import listed, shown
from swpipe.device import Device, on_cpu

States = dict[str, Any]
"""Name of a generator to its state."""

_MT19937_NUMBERS = 624
"""So many has a state of numpy's default generator."""

_TOLD = {
    "torch": "torch's default generators",
    "python": "Python's default generator",
    "numpy": "numpy's default generator",
}


DEFAULTS = frozenset(_TOLD)
"""Their names."""


class PassGenerators:
    """Reads and sets their states, as numbers, strings and tensors.

    Attributes:
        device: Whose default generators count, beside the CPU's.

    Args:
        loader: The loader.
        device: Whose default generators count, beside the CPU's.
    """

    def __init__(self, loader: Any, device: Device) -> None:
        self._places = own_generators(loader)
        self.device = device
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    @property
    def own(self) -> dict[str, Any]:
        """Name to generator, of those that the loader, its samplers and its dataset have."""
        return {name: self._generator(name) for name in self._places}

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
        for name in (*DEFAULTS, *self._places) if names is None else names:
            if name == "torch":
                found[name] = self.device.generator_states()
            elif (generator := self._generator(name)) is not None:
                found[name] = _state_of(generator)
        return found

    def write(self, states: Mapping[str, Any]) -> None:
        """Set what ``read`` returned."""
        for name, state in states.items():
            if name == "torch":
                self.device.set_generator_states(state)
            elif (generator := self._generator(name)) is not None:
                _set(generator, state)

    def check(self, states: object, what: str) -> None:
        """Refuse what are no states of these generators.

        Raises:
            ValueError: It says what is wrong.
        """
        if not isinstance(states, Mapping):
            raise ValueError(f"its {what} is {shown(states)}, and no random states")
        known = {*DEFAULTS, *self.own}
        if unknown := [name for name in states if name not in known]:
            raise ValueError(
                f"its {what} has {listed([shown(name) for name in unknown], most=3)}, and this "
                "loop has no such random generator: resume with a loader that is made in the same "
                "way"
            )
        for name, state in states.items():
            try:
                self._try(name, state)
            except Exception as error:
                raise ValueError(
                    f"its {what} has no state of {told(name)}: {type(error).__name__}: {error}"
                ) from error

    def _try(self, name: str, state: Any) -> None:
        """Set a state of another generator of the same kind; raises whatever that raises."""
        if name != "torch":
            if (generator := self._generator(name)) is not None:
                _set(_another(generator), state)
            return
        for name in state:
            if on_cpu(torch.device(name)):
                torch.Generator().set_state(state[name])
        now = self.device.generator_states()
        for device, one in state.items():
            if device in now and (one.dtype, one.shape) != (now[device].dtype, now[device].shape):
                raise TypeError(f"it is another kind of state of {device}")


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
        generator.set_state(state)
    else:
        # numpy reads past the end of a shorter one, and draws from wherever the position is.
        position = state["state"].get("pos", 0)
        if not 0 <= position <= _MT19937_NUMBERS:
            raise ValueError(f"its position is {shown(position)}: 0 to {_MT19937_NUMBERS}")
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _another(generator: Any) -> Any:
    """Of the same kind."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    bits = getattr(generator, "bit_generator", None)
    return type(generator)() if bits is None else type(generator)(type(bits)())


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names of the generators that both have, and whose states differ."""
    return frozenset(name for name in before.keys() & after.keys() if _differ(before, after, name))


def changed_devices(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Those whose default generator of torch has another state."""
    if "torch" not in before:
        return set()
    now = after["torch"]
    return {name for name, state in before["torch"].items() if not torch.equal(state, now[name])}


def _differ(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    if name == "torch":
        return bool(changed_devices(before, after))
    one, other = before[name], after[name]
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


def told(name: str) -> str:
    """What a message calls a generator."""
    return _TOLD.get(name, name)
