"""Copies and bitwise comparisons of the values that a loop produces, leaf by leaf.

Tensors, arrays and floats are the same if all bits are, other objects if they are ``==``;
functions, and objects whose class defines no ``==``, are not compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._values.containers import LEAF, TENSOR, kind_of
from swpipe._values.walk import ValueNode, parts_of


class _Marker:
    """An object that prints as some words and is equal to itself only."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


ABSENT: Any = _Marker("nothing")
"""Stands for a value that one side does not have."""

DELETED: Any = _Marker("deleted")
"""Stands for a value that was deleted."""


class Unequal(NamedTuple):
    """The place where two values differ.

    Attributes:
        name: The name of the leaf: an attribute and the keys within its containers.
        element: Indices into the leaf, a tensor, from 0; () for the leaf as a whole.
        a: The first side's value there, or ``ABSENT``.
        b: The second side's.
    """

    name: str
    element: tuple[int, ...]
    a: Any
    b: Any


def first_unequal(
    a: Mapping[str, Any], b: Mapping[str, Any], rtol: float = 0.0, atol: float = 0.0
) -> Unequal | None:
    """Return the first leaf and element in which two sides differ, or None if they are equal.

    Args:
        a: The leaves of the first side, by name.
        b: The leaves of the second side, by name.
        rtol: The relative tolerance of ``torch.isclose``, for floating-point tensors.
        atol: The absolute tolerance of ``torch.isclose``, for floating-point tensors.
    """
    # A merged dict keeps the order of both sides, so that the first difference is the earliest one.
    for name in {**a, **b}:
        left = a.get(name, ABSENT)
        right = b.get(name, ABSENT)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            place = _first_different(left, right, rtol, atol)
            if place:
                left = left[place].item()
                right = right[place].item()
        else:
            is_there = left is not ABSENT and right is not ABSENT
            place = None if is_there and _equal(left, right) else ()
        if place is not None:
            return Unequal(name, place, left, right)
    return None


def leaves_by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all leaves of named values, by the value's name and the leaf's place in the value."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        _collect(name, value, leaves, set())
    return leaves


def copies(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the leaves, which later changes in place do not affect."""
    return {name: _copied(leaf) for name, leaf in leaves.items()}


def _collect(name: str, value: Any, leaves: dict[str, Any], outer: set[int]) -> None:
    """Add the leaves of a value; ``outer`` has the ids of the containers around it."""
    kind = kind_of(type(value))
    # Models and optimizers are compared by their state, not by identity.
    if kind is LEAF and hasattr(value, "state_dict") and not isinstance(value, type):
        _collect(name, value.state_dict(), leaves, outer)
    elif kind is LEAF or kind is TENSOR:
        leaves[name] = value
    elif id(value) not in outer:  # a container may contain itself
        node = ValueNode.of(value)
        # Sequences have no keys: their places stand for them.
        for key, child in zip(node.keys or range(len(node.children)), node.children, strict=True):
            _collect(f"{name}[{key!r}]", child, leaves, outer | {id(value)})


def _copied(leaf: Any) -> Any:
    """Return a copy of a leaf, or the leaf itself if it is not compared."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if _is_compared(leaf) else leaf


def _is_compared(leaf: Any) -> bool:
    """Return whether a leaf's class says what equal means."""
    own: Any = type(leaf).__eq__
    return own is not object.__eq__ and not callable(leaf)


def _first_different(
    left: Tensor, right: Tensor, rtol: float, atol: float
) -> tuple[int, ...] | None:
    """Return the indices of the first difference: () for the whole tensor, None if equal."""
    if left.layout != right.layout or left.is_nested != right.is_nested:
        return ()
    if left.is_nested:  # shapes cannot be compared: each ragged size is a new symbol
        parts = left.detach().unbind()
        others = right.detach().unbind()
    elif left.shape == right.shape:
        parts = (*parts_of(left),)
        others = (*parts_of(right),)
    else:
        return ()
    if len(parts) != len(others):
        return ()
    for part, other in zip(parts, others, strict=True):
        if part.shape != other.shape or part.dtype != other.dtype:
            return ()
        different = (_bytes(part) != _bytes(other)).any(1)
        # A tolerance excuses elements; it never finds a difference that the bits do not show.
        if part.dtype.is_floating_point and (rtol or atol):
            flat, flat_other = (each.detach().cpu().reshape(-1) for each in (part, other))
            different &= ~torch.isclose(flat, flat_other, rtol=rtol, atol=atol, equal_nan=True)
        if different.any():
            # An index into a part, such as a sparse tensor's values, is no index of the tensor.
            place = torch.unravel_index(different.nonzero()[0, 0], part.shape)
            return tuple(int(number) for number in place) if part is left else ()
    return None


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one row per element.

    As bytes, NaN equals NaN, and 0.0 does not equal -0.0.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1, 1).contiguous()
    return flat.view(torch.uint8)


def _equal(left: Any, right: Any) -> bool:
    """Return whether two leaves that are not both tensors are the same."""
    if type(left) is not type(right):
        return False
    if hasattr(left, "tobytes") and hasattr(left, "dtype"):  # an array or a scalar of numpy
        contents = [(each.dtype, each.shape, each.tobytes()) for each in (left, right)]
        return bool(contents[0] == contents[1])
    # repr tells 0.0 from -0.0, and has one text for NaN.
    if isinstance(left, float | complex):
        return repr(left) == repr(right)
    return not _is_compared(left) or bool(left == right)
