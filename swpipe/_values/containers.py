"""Opening of containers and making of new ones: each type is a tensor, a leaf, or of a kind.

``swpipe._values.walk`` lists the types that are opened, and walks over values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Items = Callable[[Any], Iterable[Any]]


def _none(value: Any) -> tuple[()]:
    return ()


class Kind(NamedTuple):
    """The way to open and remake the containers of some types.

    A kind without children is a leaf or a tensor. A container that may contain itself is remade by
    ``fill``: an empty container is made before the children are known. Any other container is
    remade at once, by ``make``.

    Attributes:
        children: Returns the items of a container, one level deep.
        keys: Returns the names of the children; empty if the order identifies the children.
        empty: Returns a container of the same type, for ``fill``.
        fill: ``fill(new, value, children)`` makes ``new`` like ``value``, with these children.
        make: ``make(value, old, children)`` returns a container like ``value``, with ``children``
            in place of the ``old`` ones.
    """

    children: Items = _none
    keys: Items = _none
    empty: Callable[[Any], Any] = copy.copy
    fill: Callable[[Any, Any, Sequence[Any]], None] | None = None
    make: Callable[[Any, Sequence[Any], Sequence[Any]], Any] | None = None


def _fill_mapping(new: Any, value: Any, children: Sequence[Any]) -> None:
    for key, child in zip(value.keys(), children, strict=True):
        new[key] = child


def _fill_items(new: Any, value: Any, children: Sequence[Any]) -> None:
    # copy.copy, which makes the empty container, copies its items; it also keeps a deque's maxlen.
    new.clear()
    (new.update if isinstance(new, set) else new.extend)(children)


def _immutable(base: Any) -> Kind:
    """Return the kind of tuples or frozensets and their subclasses."""

    def make(value: Any, old: Sequence[Any], children: Sequence[Any]) -> Any:
        if all(a is b for a, b in zip(old, children, strict=True)):
            return value
        # Not the subclass's own __new__: a named tuple's takes other arguments.
        new = base.__new__(type(value), children)
        if attributes := getattr(value, "__dict__", None):
            new.__dict__.update(attributes)
        return new

    return Kind(iter, make=make)


def _registered(definition: pytree.NodeDef) -> Kind:
    """Return the kind of a node registered with torch's pytree."""

    def make(value: Any, old: Sequence[Any], children: Sequence[Any]) -> Any:
        return definition.unflatten_fn(list(children), definition.flatten_fn(value)[1])

    return Kind(lambda value: definition.flatten_fn(value)[0], make=make)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    # Not the class's own method: Python's returns the object's __dict__, or that and the slots.
    state: Any = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    return {**(attributes or {}), **slots}


def _empty_object(value: Any) -> Any:
    """Return an object of the same class, without attributes."""
    cls: Any = type(value)
    try:
        return object.__new__(cls)  # runs no code of the class, and not __init__
    except TypeError:  # a subclass of a class written in C
        return cls.__new__(cls)


def _fill_object(new: Any, value: Any, children: Sequence[Any]) -> None:
    own = getattr(value, "__dict__", {})
    for name, child in zip(_attributes(value), children, strict=True):
        if name in own:
            vars(new)[name] = child
        else:
            object.__setattr__(new, name, child)  # frozen dataclasses raise in setattr


BY_ATTRIBUTES = Kind(
    lambda value: _attributes(value).values(), _attributes, _empty_object, _fill_object
)
"""The kind of objects whose children are their attributes, including those in slots."""

LEAF = Kind()
TENSOR = Kind()
_MAPPING = Kind(methodcaller("values"), methodcaller("keys"), fill=_fill_mapping)
_ITEMS = Kind(iter, fill=_fill_items)

KINDS: dict[type, Kind] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict), _MAPPING),
    **dict.fromkeys((list, deque, set), _ITEMS),
    **dict.fromkeys((bool, int, float, complex, str, bytes, NoneType, range, slice), LEAF),
    **dict.fromkeys((torch.Size, torch.device, torch.dtype), LEAF),
    **dict.fromkeys((Tensor, torch.nn.Parameter), TENSOR),
    tuple: _immutable(tuple),
    frozenset: _immutable(frozenset),
}
"""The kinds of types seen so far. Unknown leaves are not added: they may be registered later."""


def kind_of(cls: type) -> Kind:
    """Return the kind of a type."""
    kind = KINDS.get(cls)
    if kind is None:
        kind = _classify(cls)
        if kind is not LEAF:
            KINDS[cls] = kind
    return kind


def has_record_stream(cls: type) -> bool:
    """Return whether objects of ``cls`` have a ``record_stream`` method."""
    return callable(getattr(cls, "record_stream", None))


def has_to(cls: type) -> bool:
    """Return whether objects of ``cls``, other than tensors and modules, have a ``to`` method."""
    return callable(getattr(cls, "to", None)) and not issubclass(cls, Tensor | torch.nn.Module)


def _classify(cls: Any) -> Kind:
    """Return the kind of a type that was not seen before."""
    if issubclass(cls, Tensor):
        return TENSOR
    if issubclass(cls, torch.nn.Module):
        return LEAF
    builtin = next(
        (b for b in (dict, list, deque, set, tuple, frozenset) if issubclass(cls, b)), None
    )
    # A subclass of a builtin container is opened as that container, even if it is a dataclass: its
    # items are not among its attributes.
    if builtin is None and (
        has_record_stream(cls)
        or hasattr(cls, "__dataclass_fields__")
        or hasattr(cls, "__attrs_attrs__")
        or issubclass(cls, SimpleNamespace | UserDict | UserList)
    ):
        return BY_ATTRIBUTES
    # The pytree is private in torch 2.13 (torch.utils._pytree).
    if cls in pytree.SUPPORTED_NODES:
        return _registered(pytree.SUPPORTED_NODES[cls])
    return LEAF if builtin is None else KINDS[builtin]
