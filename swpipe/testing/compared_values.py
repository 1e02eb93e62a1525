"""What a loop leaves, leaf by leaf, copied, and compared bit by bit.

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
"""Stands for a value that is there no more."""


class Unequal(NamedTuple):
    """Where two values differ.

    Attributes:
        name: Of the leaf: an attribute, and the way through containers.
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
    """The first leaf and element, in order, in which two sides differ; by more, if that is given.

    Args:
        a: Leaves by name.
        b: Those of the other side.
        rtol: As ``torch.isclose`` has it, for tensors of floating-point numbers.
        atol: Likewise.
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
    """All leaves of some values, each under the value's name and its place in it."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        _collect(name, value, found, set())
    return found


def copies(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves as they are now."""
    return {name: _copied(leaf) for name, leaf in leaves.items()}


def _collect(name: str, value: Any, found: dict[str, Any], outer: set[int]) -> None:
    kind = kind_of(type(value))
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
    """Where two tensors differ; () as a whole, None nowhere."""
    if plain.layout != ahead.layout or plain.is_nested != ahead.is_nested:
        return ()
    if plain.is_nested:  # a ragged size is a new symbol for each tensor
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
