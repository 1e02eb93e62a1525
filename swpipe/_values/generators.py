"""The states of random generators: torch's, Python's and numpy's default ones, and any others."""

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
    """Return the states of the default generators as plain data; numpy's if it is loaded."""
    states: dict[str, Any] = {"torch": device.generator_states(), "python": random.getstate()}
    # Not imported here: numpy is optional, and unless it is loaded, nothing can draw from it.
    if numpy := sys.modules.get("numpy.random"):
        kind, keys, *rest = numpy.get_state()
        # Plain lists, so that states can be compared and saved in a checkpoint.
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_default_generators(device: Device, states: Mapping[str, Any]) -> None:
    """Set the states that ``default_generators`` returned."""
    device.set_generator_states(states["torch"])
    # A checkpoint may have turned Python's tuple into a list, which setstate refuses.
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if (numpy := sys.modules.get("numpy.random")) and "numpy" in states:
        numpy.set_state(tuple(states["numpy"]))


def generator_states(device: Device, others: Mapping[str, Any]) -> dict[str, object]:
    """Return the states of the default generators and of others by name, to be compared."""
    defaults = default_generators(device)
    states = {
        TORCH: [bytes(state.numpy()) for state in defaults["torch"].values()],
        PYTHON: defaults["python"],
        **({NUMPY: defaults["numpy"]} if "numpy" in defaults else {}),
    }
    return states | {name: state_of(generator) for name, generator in others.items()}


def state_of(generator: Any) -> Any:
    """Return the state of a generator of torch, Python or numpy, to be compared and set back."""
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
    """Return numpy's bit generator, which holds the state of its random generators."""
    # numpy's older RandomState has its bit generator as a private attribute only.
    return getattr(generator, "bit_generator", None) or generator._bit_generator
