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
    for name in {**a, **b}:
        one = a.get(name, ABSENT)
        other = b.get(name, ABSENT)
        if one is ABSENT or other is ABSENT:
            return Unequal(name, (), one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            place = _first_different(one, other, rtol, atol)
            if place:
                one = one[place].item()
                other = other[place].item()
        else:
            place = None if _equal(one, other) else ()
        if place is not None:
            return Unequal(name, place, one, other)
    return None


def leaves_by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all leaves of named values, by the value's name and the leaf's place in the value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        _collect(name, value, found, set())
    return found


def copies(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the leaves, which later changes in place do not affect."""
    return {name: _copied(leaf) for name, leaf in leaves.items()}


def _collect(name: str, value: Any, found: dict[str, Any], outer: set[int]) -> None:
    kind = kind_of(type(value))
    # Models and optimizers are compared by their state, not by identity.
    if kind is LEAF and hasattr(value, "state_dict") and not isinstance(value, type):
        _collect(name, value.state_dict(), found, outer)
    elif kind is LEAF or kind is TENSOR:
        found[name] = value
    elif id(value) not in outer:  # a container may contain itself
        node = ValueNode.of(value)
        for key, child in zip(node.keys or range(len(node.children)), node.children, strict=True):
            _collect(f"{name}[{key!r}]", child, found, outer | {id(value)})


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if _is_compared(leaf) else leaf


def _is_compared(leaf: Any) -> bool:
    own: Any = type(leaf).__eq__
    return own is not object.__eq__ and not callable(leaf)


def _first_different(
    plain: Tensor, ahead: Tensor, rtol: float, atol: float
) -> tuple[int, ...] | None:
    """Return the indices of the first difference: () for the whole tensor, None if equal."""
    if plain.layout != ahead.layout or plain.is_nested != ahead.is_nested:
        return ()
    if plain.is_nested:  # shapes cannot be compared: each ragged size is a new symbol
        parts = plain.detach().unbind()
        others = ahead.detach().unbind()
    elif plain.shape == ahead.shape:
        parts = (*parts_of(plain),)
        others = (*parts_of(ahead),)
    else:
        return ()
    if len(parts) != len(others):
        return ()
    for one, other in zip(parts, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return ()
        # Bytes, not values: NaN equals NaN then, and 0.0 differs from -0.0.
        different = (_bytes(one) != _bytes(other)).any(1)
        if one.dtype.is_floating_point and (rtol or atol):
            left, right = (part.detach().cpu().reshape(-1) for part in (one, other))
            different &= ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
        if different.any():
            place = torch.unravel_index(different.nonzero()[0, 0], one.shape)
            return tuple(int(number) for number in place) if one is plain else ()
    return None


def _bytes(tensor: Tensor) -> Tensor:
    """One row for each element: as bytes NaN equals NaN, and 0.0 does not equal -0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1, 1).contiguous()
    return flat.view(torch.uint8)


def _equal(plain: Any, ahead: Any) -> bool:
    if type(plain) is not type(ahead):
        return False
    if hasattr(plain, "tobytes") and hasattr(plain, "dtype"):  # numpy's
        kinds = [(one.dtype, one.shape, one.tobytes()) for one in (plain, ahead)]
        return bool(kinds[0] == kinds[1])
    if isinstance(plain, float | complex):
        return repr(plain) == repr(ahead)
    return not _is_compared(plain) or bool(plain == ahead)
