"""Python values as plain data: numbers, strings, tensors, and lists that begin with a kind.

    [1, "a"]               ["list", 1, "a"]
    np.arange(3)           ["array", tensor]
    random.Random(0)       ["random", state]

``torch.load(weights_only=True)`` reads them.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any

import torch

from swpipe._tensors.stateful import PLAIN, is_generator

MAX_ITEMS = 2**16
"""Of a list and the like."""

MAX_BYTES = 2**24
"""Of a tensor or an array."""

_SEQUENCES = {one.__name__: one for one in (list, tuple, set, frozenset, deque)}


def plain(value: Any) -> Any:
    """The value as plain data.

    Raises:
        TypeError: It has something else, or is larger than the limits.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if is_generator(value):
        return _plain_generator(value)
    if kind in (dict, *_SEQUENCES.values()) and len(value) <= MAX_ITEMS:
        items = [each for pair in value.items() for each in pair] if kind is dict else value
        return [kind.__name__, *map(plain, items)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and kind is not numpy.void:
        return ["scalar", torch.from_numpy(numpy.array(value))]
    if kind in (torch.Tensor, getattr(numpy, "ndarray", None)) and value.nbytes <= MAX_BYTES:
        if kind is not torch.Tensor:
            return ["array", torch.from_numpy(value.copy())]
        if value.layout is torch.strided and not value.requires_grad:
            return ["tensor", value.clone()]
    raise TypeError(f"{kind.__name__} is no plain data")


def _plain_generator(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return ["torch", str(generator.device), generator.get_state()]
    if isinstance(generator, random.Random):
        return ["random", *generator.getstate()]
    if hasattr(generator, "bit_generator"):
        return ["numpy", plain(generator.bit_generator.state)]
    return ["RandomState", plain(generator.get_state(legacy=False))]


def made_from(data: Any) -> Any:
    """A value like that which ``plain`` was given."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind == "dict":
        items = [made_from(part) for part in parts]
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(made_from, parts))
    if kind == "tensor":
        return parts[0].clone()
    if kind in ("array", "scalar"):
        array = parts[0].cpu().numpy().copy()
        return array if kind == "array" else array[()]
    device = parts[0] if kind == "torch" else ""
    generator = torch.Generator(device) if device else _MAKERS[kind](made_from(parts[0]))
    set_generator(generator, data)
    return generator


def _numpy_generator(state: Any) -> Any:
    numpy: Any = sys.modules["numpy"]
    return numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())


_MAKERS: dict[str, Any] = {
    "random": lambda state: random.Random(),
    "numpy": _numpy_generator,
    "RandomState": lambda state: sys.modules["numpy"].random.RandomState(),
}


def set_generator(generator: Any, data: Any) -> None:
    """Set the state that ``plain`` returned for such a generator."""
    kind, *parts = data
    if kind == "torch":
        generator.set_state(parts[1].cpu())
    elif kind == "random":
        version, internal, gauss = parts
        generator.setstate((version, tuple(internal), gauss))
    elif kind == "numpy":
        generator.bit_generator.state = made_from(parts[0])
    else:
        generator.set_state(made_from(parts[0]))
