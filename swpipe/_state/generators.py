"""The states of random generators: the default ones of torch, Python and numpy, and others."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from swpipe.device import Device

TORCH = "torch's default generators"
PYTHON = "Python's default generator"
NUMPY = "numpy's default generator"


def default_generators(device: Device) -> dict[str, Any]:
    """The states of the default ones now, as plain data; numpy's if it is loaded."""
    states: dict[str, Any] = {"torch": device.generator_states(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy.random"):
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_default_generators(device: Device, states: Mapping[str, Any]) -> None:
    """Set the states that ``default_generators`` returned."""
    device.set_generator_states(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if (numpy := sys.modules.get("numpy.random")) and "numpy" in states:
        numpy.set_state(tuple(states["numpy"]))


def generator_states(device: Device, found: Mapping[str, Any]) -> dict[str, object]:
    """Name to state, to be compared, of the default generators and of ``found``."""
    states: dict[str, object] = {
        TORCH: [_bytes(state) for state in device.generator_states().values()],
        PYTHON: random.getstate(),
    }
    if numpy := sys.modules.get("numpy.random"):
        states[NUMPY] = pickle.dumps(numpy.get_state())
    return states | {name: state_of(generator) for name, generator in found.items()}


def state_of(generator: Any) -> object:
    """The state of a generator of torch, Python or numpy, to be compared."""
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(_bits(generator).state)


def set_back(generator: Any, state: Any) -> None:
    """Set a state that ``saved_state`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = pickle.loads(state)


def saved_state(generator: Any) -> Any:
    """The state of a generator, for ``set_back``."""
    return generator.get_state() if isinstance(generator, torch.Generator) else state_of(generator)


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())
