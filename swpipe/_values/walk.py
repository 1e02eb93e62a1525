"""The walk over a nested value: its tensors and containers, and the value with other tensors.

What is opened:

- list, tuple (also named), dict, set, frozenset, deque, and their subclasses;
- instances of dataclasses and attrs classes, of ``SimpleNamespace``, ``UserDict`` and ``UserList``,
  by their attributes;
- objects with a ``record_stream`` method, such as torchrec's ``KeyedJaggedTensor``, also by their
  attributes, so that their other values (keys, strides, cached lists) are kept;
- nodes registered with ``torch.utils._pytree``.

Everything else is a leaf: modules, arrays, iterators, objects of plain classes. To have your own
class opened, make it a dataclass, give it a ``record_stream`` method, or register it. Objects with
a ``to`` method (an amount with a unit, a storage, a pipeline with open files) are leaves, too: they
are never made anew; ``tensors_held`` and ``record_stream``, which only look, open them as well.

Unlike torch's pytree functions, the functions of this module handle cycles and keep shared objects
shared. Dictionary keys are not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swpipe._values.containers import (
    BY_ATTRIBUTES,
    KINDS,
    LEAF,
    TENSOR,
    Kind,
    has_record_stream,
    has_to,
    kind_of,
)

T = TypeVar("T")


Part: TypeAlias = tuple[Any, Kind, tuple[Any, ...]]
"""A tensor or a container, its kind, and its present contents, one level deep."""


class ValueNode(NamedTuple):
    """A container and its contents, one level deep, at one moment; sequences have no keys."""

    value: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> ValueNode:
        """Return a container with its present contents.

        The contents of an object that is no container are its attributes.
        """
        kind = kind_of(type(container))
        if kind is LEAF:
            kind = BY_ATTRIBUTES
        return cls(container, tuple(kind.keys(container)), tuple(kind.children(container)))


def parts_in(value: Any, opens: Callable[[Any], Kind | None] | None = None) -> Iterator[Part]:
    """Yield every tensor and container in ``value``, each once, depth-first, outer before inner.

    ``opens`` returns the kind of a leaf that is to be a part as well, or None for any other leaf.
    """
    # The seen values are kept, not only their ids: the flatten function of a registered node may
    # create its children, and the id of a freed object can be used again.
    visited: dict[int, Any] = {}
    stack = [value]
    while stack:
        value = stack.pop()
        kind = KINDS.get(type(value)) or kind_of(type(value))
        if kind is LEAF:
            opened = None if opens is None else opens(value)
            if opened is None:
                continue
            kind = opened
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if kind is TENSOR:
            yield value, kind, ()
            continue
        children = tuple(kind.children(value))
        yield value, kind, children
        # Most children are plain values: a turn of the loop for each would be most of the walk's
        # time.
        stack += [child for child in reversed(children) if KINDS.get(type(child)) is not LEAF]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``value``, each once, in depth-first order."""
    return iter([part for part, kind, _ in parts_in(value) if kind is TENSOR])


def tensors_held(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``value``, and those in attributes of objects with a ``to`` method."""
    return iter([part for part, kind, _ in parts_in(value, _with_to) if kind is TENSOR])


def _with_to(value: Any) -> Kind | None:
    """Return the kind of a leaf with a ``to`` method, by its attributes; None for another one."""
    return BY_ATTRIBUTES if has_to(type(value)) else None


def nodes_in(value: Any) -> Iterator[ValueNode]:
    """Yield every container in ``value``, itself included, each once, outer before inner."""
    for container, kind, children in parts_in(value):
        if kind is not TENSOR:
            yield ValueNode(container, tuple(kind.keys(container)), children)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield every value in ``value`` that is neither a tensor nor a container.

    If ``value`` itself is neither, it is the only one.
    """
    if kind_of(type(value)) is LEAF:
        yield value
    for _, _, children in parts_in(value):
        yield from (child for child in children if kind_of(type(child)) is LEAF)


def map_tensors(
    value: T,
    fn: Callable[[Tensor], Any],
    leaf: Callable[[Any], Any] | None = None,
    own: Callable[[Any], Any] | None = None,
) -> T:
    """Return ``value`` with every tensor replaced by ``fn(tensor)``, leaves by ``leaf(value)``.

    ``fn`` is called once per tensor, and objects shared within ``value`` are shared within the
    result. Mutable containers are always new; leaves, and tuples and frozensets in which nothing
    changed, are the same objects. With ``own``, objects with a ``to`` method are replaced by
    ``own(object)``, and not opened. The nesting depth is limited by Python's recursion limit.
    """
    result: T = _rebuilt(value, fn, leaf, own, {})
    return result


# Not a function within map_tensors: it would refer to itself in a cycle, which would keep alive all
# values that it has seen until garbage is collected.
def _rebuilt(
    value: Any,
    fn: Callable[[Tensor], Any],
    leaf: Callable[[Any], Any] | None,
    own: Callable[[Any], Any] | None,
    memo: dict[int, tuple[Any, Any]],
) -> Any:
    """Return ``value`` rebuilt as in ``map_tensors``; ``memo`` maps ids to value and copy."""
    cls = type(value)
    kind = KINDS.get(cls) or kind_of(cls)
    if kind is LEAF and (own is None or not has_to(cls)):
        return value if leaf is None else leaf(value)
    # The memo holds each value beside its copy, so that no freed object's id is used again.
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    if kind is TENSOR:
        new = fn(value)
    elif own is not None and has_to(cls):
        new = own(value)
    elif kind.fill is not None:
        new = kind.empty(value)
        # Stored before its children are built: one of them may contain the container itself.
        memo[id(value)] = (value, new)
        children = [_rebuilt(child, fn, leaf, own, memo) for child in kind.children(value)]
        kind.fill(new, value, children)
    else:
        old = tuple(kind.children(value))
        remade = tuple(_rebuilt(child, fn, leaf, own, memo) for child in old)
        known = memo.get(id(value))
        if known is not None:  # built in the meantime, through a cycle
            return known[1]
        # Immutable containers are made from their new children, so they cannot be stored before.
        new = kind.make(value, old, remade) if kind.make else value
    memo[id(value)] = (value, new)
    return new


def grad_or_none(tensor: Tensor) -> Tensor | None:
    """Return ``tensor.grad`` without torch's warning for tensors that cannot have one."""
    if is_lazy(tensor):
        return None
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def record_stream(value: Any, *streams: Any) -> None:
    """Keep the memory of ``value`` from being reused before the current work of ``streams`` ends.

    ``Tensor.record_stream`` is called for every tensor that ``value`` holds on an accelerator, and
    for its ``.grad``; an object's own ``record_stream`` is called if the object holds no tensor.
    The gradients of an ``nn.Parameter`` are left out: other iterations may be training it, and
    torch may crash if another thread reads them.
    """
    parts, opaque = _on_device(value)
    for owner in (*parts, *opaque):
        for stream in streams:
            owner.record_stream(stream)


def device_storages(value: Any, *streams: Any) -> list[torch.UntypedStorage]:
    """Return the storages of everything that ``record_stream`` finds, each once.

    Objects that hold no tensor have no known storage: their own ``record_stream`` is called for
    each stream.
    """
    parts, opaque = _on_device(value)
    for owner in opaque:
        for stream in streams:
            owner.record_stream(stream)
    storages = (part.untyped_storage() for part in parts)
    return [*{storage._cdata: storage for storage in storages}.values()]


def _on_device(value: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors on an accelerator, gradients included, and objects without a tensor."""
    tensors: list[Tensor] = []
    opaque: list[Any] = []
    for part, kind, children in parts_in(value, _with_to):
        if kind is TENSOR:
            tensors.append(part)
        elif has_record_stream(type(part)) and not any(map(_holds_tensor, children)):
            opaque.append(part)
    # See record_stream: a parameter's gradient may be in use by another thread.
    leaves = [t for t in tensors if t.requires_grad and t.is_leaf and not isinstance(t, Parameter)]
    tensors += [t.grad for t in leaves if t.grad is not None]
    # A wrapper on the device may have parts on the host, as a jagged tensor its cached lengths.
    there = [t for t in tensors if not (t.is_cpu or t.is_meta)]
    return [part for t in there for part in parts_of(t) if not part.is_cpu], opaque


def _holds_tensor(value: Any) -> bool:
    """Return whether there is a tensor anywhere in a value."""
    return any(kind is TENSOR for _, kind, _ in parts_in(value, _with_to))


def inner_tensors(tensor: Any) -> tuple[Tensor, ...]:
    """Return the tensors inside a wrapper such as a DTensor, one level deep.

    Any other tensor has none. A wrapper may list other parts among them, such as the device mesh of
    a
    DTensor; these are left out.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return ()
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return tuple(part for part in parts if isinstance(part, Tensor))


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that ``tensor`` consists of; usually itself."""
    if inner := inner_tensors(tensor):
        for part in inner:
            yield from parts_of(part)
    elif tensor.layout is torch.sparse_coo:
        # _indices and _values are private in torch 2.13; indices() raises for uncoalesced tensors.
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def unsharded(tensor: Any) -> Iterator[Any]:
    """Yield a tensor itself, or this rank's shards of a ShardedTensor.

    A ShardedTensor is not a ``Tensor``.
    """
    if hasattr(tensor, "local_shards"):
        yield from (shard.tensor for shard in tensor.local_shards())
    else:
        yield tensor
