"""States of random number generators: a task that changes one has drawn from it."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from swpipe.device import Device

TORCH = "torch's default generators"
"""Tasks with ``random=True`` need no order for these."""


PYTHON = "Python's default generator"
NUMPY = "numpy's default generator"


def generator_states(device: Device, found: Mapping[str, Any]) -> dict[str, object]:
    """Name to state, of the default generators of torch, Python and numpy and of ``found``."""
    states: dict[str, object] = {
        TORCH: [_bytes(state) for state in device.generator_states().values()],
        PYTHON: random.getstate(),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states[NUMPY] = pickle.dumps(numpy.get_state())
    return states | {name: _state(generator) for name, generator in found.items()}


def _state(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return pickle.dumps(bits.state)


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())
