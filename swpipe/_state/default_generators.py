"""The states of the default random generators, as plain data: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from swpipe.device import Device


def default_generators(device: Device) -> dict[str, Any]:
    """Their states now, as tensors, numbers and strings; numpy's if it is loaded."""
    states: dict[str, Any] = {"torch": device.generator_states(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy.random"):
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_default_generators(device: Device, states: dict[str, Any]) -> None:
    """Set the states that ``default_generators`` returned."""
    device.set_generator_states(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if (numpy := sys.modules.get("numpy.random")) and "numpy" in states:
        numpy.set_state(tuple(states["numpy"]))


def changed_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names of the generators whose states differ."""
    return frozenset(name for name in before if not _equal(before[name], after.get(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):  # torch's, by device
        return all(name in other and torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)
