"""The random generators that matter to a loop: the default ones, and those a loader was given.

A state is read in the form that is the cheapest to compare, and saved as plain data.
"""

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
    """Reads and sets their states.

    Attributes:
        own: Name to generator, of those that the loader and its samplers were given.
        device: Whose default generators count, beside the CPU's.

    Args:
        loader: The loader.
        device: Whose default generators count, beside the CPU's.
    """

    def __init__(self, loader: Any, device: Device) -> None:
        self.own = own_generators(loader)
        self.device = device
        self._access = GeneratorAccess(TaskSeeds(0, device), ProgressCounter())

    def exclusive(self) -> AbstractContextManager[None]:
        """Within the block no task on another thread uses the default ones."""
        return nullcontext() if this_thread.access is not None else self._access.exclusive()

    def read(self, names: Collection[str] | None = None) -> States:
        """The states now, of all or of some."""
        wanted = ("torch", "python", "numpy", *self.own) if names is None else names
        found: States = {}
        for name in wanted:
            if name == "torch":
                found[name] = self.device.generator_states()
            elif name == "python":
                found[name] = random.getstate()
            elif name != "numpy":
                found[name] = self.own[name].get_state()
            elif numpy := sys.modules.get("numpy.random"):
                found[name] = numpy.get_state()
        return found

    def write(self, states: Mapping[str, Any]) -> None:
        """Set what ``read`` or ``saved`` returned."""
        for name, state in states.items():
            if name == "torch":
                self.device.set_generator_states(state)
            elif name == "python":
                version, internal, gauss = state
                random.setstate((version, tuple(internal), gauss))
            elif name != "numpy":
                self.own[name].set_state(state)
            elif numpy := sys.modules.get("numpy.random"):
                numpy.set_state(tuple(state))

    def saved(self, names: Collection[str] | None = None) -> States:
        """The states now, as numbers, strings and tensors."""
        return saved_form(self.read(names))

    def check(self, states: object, what: str) -> None:
        """Refuse what are no states of these generators.

        Raises:
            ValueError: It says what is wrong.
        """
        if not isinstance(states, Mapping):
            raise ValueError(f"its {what} is {shown(states)}, and no random states")
        known = {"torch", "python", "numpy", *self.own}
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
        if name == "python":
            version, internal, gauss = state
            random.Random().setstate((version, tuple(internal), gauss))
        elif name == "numpy":
            # numpy reads past the end of a shorter one, and draws from wherever the position is.
            kind, keys, position, has_gauss, gauss = state
            if not 0 <= position <= _MT19937_NUMBERS:
                raise ValueError(f"its position is {shown(position)}: 0 to {_MT19937_NUMBERS}")
            if numpy := sys.modules.get("numpy.random"):
                numpy.RandomState().set_state((kind, keys, position, has_gauss, gauss))
        elif name == "torch":
            for name in state:
                if on_cpu(torch.device(name)):
                    torch.Generator().set_state(state[name])
            now = self.device.generator_states()
            for device, one in state.items():
                if device in now and (one.dtype, one.shape) != (
                    now[device].dtype,
                    now[device].shape,
                ):
                    raise TypeError(f"it is another kind of state of {device}")
        else:
            torch.Generator(self.own[name].device).set_state(state)


def saved_form(states: Mapping[str, Any]) -> States:
    """As numbers, strings and tensors: numpy's has an array."""
    found = dict(states)
    if "numpy" in found:
        kind, keys, *rest = found["numpy"]
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


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
    one, other = before[name], after[name]
    if name == "python":
        return bool(one != other)
    if name == "numpy":
        return bool((one[0], *one[2:]) != (other[0], *other[2:]) or (one[1] != other[1]).any())
    return bool(changed_devices(before, after)) if name == "torch" else not torch.equal(one, other)


def told(name: str) -> str:
    """What a message calls a generator."""
    return _TOLD.get(name, name)
