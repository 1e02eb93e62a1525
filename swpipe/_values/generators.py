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


def generator_states(device: Device, others: Mapping[str, Any]) -> dict[str, object]:
    """Name to state, to be compared, of the default generators and of others."""
    defaults = default_generators(device)
    states = {
        TORCH: [bytes(state.numpy()) for state in defaults["torch"].values()],
        PYTHON: defaults["python"],
        **({NUMPY: defaults["numpy"]} if "numpy" in defaults else {}),
    }
    return states | {name: state_of(generator) for name, generator in others.items()}


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, Python or numpy, to be compared and set back."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(_bits(generator).state)


def set_back(generator: Any, state: Any) -> None:
    """Set a state that ``state_of`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = pickle.loads(state)


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator
