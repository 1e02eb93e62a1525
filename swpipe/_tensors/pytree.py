"""Find the tensors in a value, however deep they lie, and build the value anew around others.

What is opened:

- list, tuple (named ones too), dict, set, frozenset, deque, and their subclasses;
- instances of dataclasses and attrs classes, of ``SimpleNamespace``, ``UserDict`` and ``UserList``:
  by their attributes;
- objects with a ``record_stream`` method, such as torchrec's ``KeyedJaggedTensor``: by attributes
  too, so that what they keep beside their tensors (keys, strides, lazily computed lists) survives;
- nodes registered with ``torch.utils._pytree``.

Everything else is a leaf, taken as it is: modules, arrays, iterators, objects of plain classes. A
class of your own is opened as a dataclass, or with a ``record_stream`` method, or once registered.

Cycles are safe. Dictionary keys are not searched. Nesting may be as deep as Python's recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swpipe._tensors.containers import KINDS, LEAF, TENSOR, has_record_stream, kind_of

T = TypeVar("T")


class Node(NamedTuple):
    """A container as it was at one moment.

    Attributes:
        value: The container itself.
        keys: What names its children (dictionary keys, attribute names); empty where order does.
        children: What it held, one level deep.
    """

    value: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``, each once, in the order in which a reader would meet them."""
    found: list[Tensor] = []
    _collect(value, {}, found, [])
    return iter(found)


def map_tensors(value: T, fn: Callable[[Tensor], Any]) -> T:
    """``value`` with every tensor replaced by what ``fn`` makes of it.

    ``fn`` is called once per tensor, and what was shared within ``value`` is shared within the
    result. Containers that can be modified are always new; leaves, and tuples and frozensets in
    which nothing changed, are the same objects.
    """
    result: T = _rebuild(value, fn, {})
    return result


def nodes_in(value: Any) -> Iterator[Node]:
    """Every container in ``value``, itself included, each once, the outer before the inner."""
    seen: dict[int, Any] = {}
    ahead = [value]
    while ahead:
        value = ahead.pop()
        kind = kind_of(type(value))
        if kind is LEAF or kind is TENSOR or id(value) in seen:
            continue
        seen[id(value)] = value
        node = open_node(value)
        yield node
        ahead.extend(reversed(node.children))


def open_node(container: Any) -> Node:
    """A container as it is now."""
    kind = kind_of(type(container))
    return Node(container, tuple(kind.keys(container)), tuple(kind.children(container)))


def record_stream(value: Any, *streams: Any) -> None:
    """Let no memory of ``value`` be used anew before what each of ``streams`` was given is done.

    Calls ``Tensor.record_stream`` for every tensor in ``value`` that lies on an accelerator, for
    its ``.grad`` too, and an object's own ``record_stream`` where no tensor is seen in it.
    """
    found: list[Tensor] = []
    blind: list[Any] = []
    _collect(value, {}, found, blind)
    found += [t.grad for t in found if t.requires_grad and t.is_leaf and t.grad is not None]
    for tensor in found:
        if not (tensor.is_cpu or tensor.is_meta):
            for part in parts_of(tensor):
                for stream in streams:
                    part.record_stream(stream)
    for owner in blind:
        for stream in streams:
            owner.record_stream(stream)


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that ``tensor`` is made of; itself as a rule."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


# The two walks. Both hold what they have seen, not only its id: a registered node may make its
# children on the spot, and the id of one that is gone is given to the next.


def _collect(
    value: Any, seen: dict[int, tuple[Any, bool]], found: list[Tensor], blind: list[Any]
) -> bool:
    """Gather tensors, and objects that must record for themselves; whether a tensor was met."""
    cls = type(value)
    kind = KINDS.get(cls) or kind_of(cls)
    if kind is LEAF:
        return False
    known = seen.get(id(value))
    if known is not None:
        return known[1]
    seen[id(value)] = (value, kind is TENSOR)
    if kind is TENSOR:
        found.append(value)
        return True
    met = False
    for child in kind.children(value):
        if _collect(child, seen, found, blind):
            met = True
    seen[id(value)] = (value, met)
    if not met and has_record_stream(cls):
        blind.append(value)
    return met


def _rebuild(value: Any, fn: Callable[[Tensor], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    cls = type(value)
    kind = KINDS.get(cls) or kind_of(cls)
    if kind is LEAF:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    if kind is TENSOR:
        new = fn(value)
    elif kind.fills:
        new = kind.empty(value)
        # Noted before its children are built: one of them may hold the container itself.
        memo[id(value)] = (value, new)
        kind.fill(new, value, [_rebuild(child, fn, memo) for child in kind.children(value)])
    else:
        old = tuple(kind.children(value))
        children = tuple(_rebuild(child, fn, memo) for child in old)
        known = memo.get(id(value))
        if known is not None:  # built meanwhile, on the way round a cycle
            return known[1]
        new = kind.make(value, old, children)
    memo[id(value)] = (value, new)
    return new
