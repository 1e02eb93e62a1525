"""How to look into a container and how to make one like it around other children.

Every type is of one kind: a tensor, a leaf, or a container of a kind below.
``swpipe._tensors.pytree``, which
tells what types are opened, walks over values by these alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Kind:
    """How to open and remake the containers of some types; as itself, a kind that has no children.

    Attributes:
        fills: A container is remade by filling an empty one (and so may hold itself), rather than
            at once from its children.
    """

    fills = False

    def keys(self, value: Any) -> Iterable[Any]:
        """What names the children; nothing where their order does."""
        return ()

    def children(self, value: Any) -> Iterable[Any]:
        """What the container holds, one level deep."""
        return ()

    def empty(self, value: Any) -> Any:
        """A container of the same type, for ``fill``."""
        return copy.copy(value)

    def fill(self, new: Any, value: Any, children: Sequence[Any]) -> None:
        """Make ``new`` like ``value``, but with these children."""
        raise NotImplementedError

    def make(self, value: Any, old: Sequence[Any], children: Sequence[Any]) -> Any:
        """A container like ``value``, but with ``children`` for the ``old`` ones."""
        raise NotImplementedError


class _Mapping(Kind):
    fills = True

    def keys(self, value: Any) -> Iterable[Any]:
        keys: Iterable[Any] = value.keys()
        return keys

    def children(self, value: Any) -> Iterable[Any]:
        children: Iterable[Any] = value.values()
        return children

    def fill(self, new: Any, value: Any, children: Sequence[Any]) -> None:
        for key, child in zip(value.keys(), children, strict=True):
            new[key] = child


class _Items(Kind):
    def children(self, value: Iterable[Any]) -> Iterable[Any]:
        return value


class _List(_Items):
    """Lists and deques."""

    fills = True

    def fill(self, new: Any, value: Any, children: Sequence[Any]) -> None:
        new.clear()
        new.extend(children)


class _Set(_Items):
    fills = True

    def fill(self, new: Any, value: Any, children: Sequence[Any]) -> None:
        new.clear()
        new.update(children)


class _Fixed(_Items):
    """Tuples and frozensets."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def make(self, value: Any, old: Sequence[Any], children: Sequence[Any]) -> Any:
        if all(a is b for a, b in zip(old, children, strict=True)):
            return value
        # Past the subclass's own __new__: what a named tuple takes there is its own affair.
        new = self.base.__new__(type(value), children)
        if attributes := getattr(value, "__dict__", None):
            new.__dict__.update(attributes)
        return new


class _Registered(Kind):
    """A node that torch's pytree knows."""

    def __init__(self, definition: pytree.NodeDef) -> None:
        self.definition = definition

    def children(self, value: Any) -> Iterable[Any]:
        return self.definition.flatten_fn(value)[0]

    def make(self, value: Any, old: Sequence[Any], children: Sequence[Any]) -> Any:
        _, context = self.definition.flatten_fn(value)
        return self.definition.unflatten_fn(list(children), context)


class _Attributes(Kind):
    """Objects taken for their attributes, those in slots included."""

    fills = True

    def __init__(self, cls: type) -> None:
        self.slots = tuple(_slots_of(cls))

    def _named(self, value: Any) -> dict[str, Any]:
        named = dict(getattr(value, "__dict__", ()))
        named |= {slot: getattr(value, slot) for slot in self.slots if hasattr(value, slot)}
        return named

    def keys(self, value: Any) -> Iterable[Any]:
        return self._named(value).keys()

    def children(self, value: Any) -> Iterable[Any]:
        return self._named(value).values()

    def empty(self, value: Any) -> Any:
        cls: Any = type(value)
        try:
            return object.__new__(cls)  # nothing of the class's own runs, __init__ least of all
        except TypeError:  # a class built on one that is written in C
            return cls.__new__(cls)

    def fill(self, new: Any, value: Any, children: Sequence[Any]) -> None:
        for name, child in zip(self._named(value), children, strict=True):
            if name in self.slots:
                object.__setattr__(new, name, child)  # past a frozen dataclass's guard
            else:
                vars(new)[name] = child


def _slots_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if private else name


LEAF, TENSOR = Kind(), Kind()
_MAPPING, _LIST, _SET = _Mapping(), _List(), _Set()
_TUPLE, _FROZENSET = _Fixed(tuple), _Fixed(frozenset)

KINDS: dict[type, Kind] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict), _MAPPING),
    **dict.fromkeys((list, deque), _LIST),
    **dict.fromkeys((bool, int, float, complex, str, bytes, NoneType, range, slice), LEAF),
    **dict.fromkeys((torch.Size, torch.device, torch.dtype), LEAF),
    set: _SET,
    tuple: _TUPLE,
    frozenset: _FROZENSET,
    Tensor: TENSOR,
    torch.nn.Parameter: TENSOR,
}
"""What is known so far. Types found to be leaves are not kept: they may yet be registered."""

_BUILTINS: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
    (dict, _MAPPING),
    ((list, deque), _LIST),
    (set, _SET),
    (tuple, _TUPLE),
    (frozenset, _FROZENSET),
)


def kind_of(cls: type) -> Kind:
    """The kind of a type."""
    kind = KINDS.get(cls)
    if kind is None:
        kind = _classify(cls)
        if kind is not LEAF:
            KINDS[cls] = kind
    return kind


def has_record_stream(cls: type) -> bool:
    """Whether objects of ``cls`` can tell their tensors of a stream that uses them."""
    return callable(getattr(cls, "record_stream", None))


def _classify(cls: type) -> Kind:
    if issubclass(cls, Tensor):
        return TENSOR
    if issubclass(cls, torch.nn.Module):
        return LEAF
    builtin = next((kind for base, kind in _BUILTINS if issubclass(cls, base)), None)
    by_attributes = (
        has_record_stream(cls)
        or hasattr(cls, "__dataclass_fields__")
        or hasattr(cls, "__attrs_attrs__")
        or issubclass(cls, SimpleNamespace | UserDict | UserList)
    )
    if by_attributes and builtin is None:
        return _Attributes(cls)
    if cls in pytree.SUPPORTED_NODES:
        return _Registered(pytree.SUPPORTED_NODES[cls])
    return builtin or LEAF
