"""What a task did to its context: attributes added, rebound, deleted, or modified in place.

An attribute is modified in place if, anywhere inside it,

- a container holds other objects, or holds them under other names;
- a tensor has another version counter (shared with views and ``detach()``, not with ``.data``),
  started to require grad, or has another or a modified ``.grad``;
- a CPU tensor without a version counter (made in inference mode) has other values. On a device
  another stream may be writing it, so it is not compared.

Not detected: changes inside leaves (see ``swpipe._tensors.pytree``), such as arrays and objects of
plain classes.

Not counted: values of parameters, which belong to their module; what an object with a
``record_stream`` method computes lazily into a private attribute that was None; and attributes that
only other threads set or deleted (``swpipe.shortcut.writes``). In-place changes by other threads
cannot be told apart: tasks that run at the same time must not modify each other's objects.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._tensors.containers import has_record_stream
from swpipe._tensors.pytree import Node, grad_or_none, nodes_in, parts_of, tensors_in
from swpipe.shortcut.writes import AttributeWrites


class Changes(NamedTuple):
    """Names of attributes; ``produced`` were added, rebound or modified in place."""

    produced: tuple[str, ...]
    deleted: tuple[str, ...]


class ContextWatch:
    """Finds what the thread that enters a ``with`` block changes on a context within it.

    ``before`` has the attributes at the start of the block; ``changes`` is set at its end.
    """

    changes: Changes

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._writes = AttributeWrites(ctx)
        self.before: dict[str, Any] = {}
        self._contents: dict[str, _Content] = {}

    def __enter__(self) -> ContextWatch:
        self._writes.__enter__()
        # One atomic copy: other threads may set attributes at any time.
        self.before = dict(vars(self._ctx))
        # The values are referenced, so that no new object can have the id of one of them.
        self._contents = {name: _Content(value) for name, value in self.before.items()}
        return self

    def __exit__(self, *failure: object) -> None:
        after = dict(vars(self._ctx))
        self._writes.__exit__()
        before, foreign = self._contents, self._writes.only_by_others
        produced = tuple(
            name
            for name, value in after.items()
            if (name not in before or before[name].value is not value or before[name].modified())
            and not foreign(name)
        )
        deleted = tuple(name for name in before if name not in after and not foreign(name))
        self.changes = Changes(produced, deleted)


class _Content:
    """The contents of all containers in a value, and the state of all tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._nodes = tuple(nodes_in(value))
        self._tensors = tuple(
            (tensor, _TensorState.of(tensor), _inference_copy(tensor))
            for tensor in tensors_in(value)
            if not isinstance(tensor, Parameter)
        )

    def modified(self) -> bool:
        return any(not same_node(node, Node.of(node.value)) for node in self._nodes) or any(
            not state.same(_TensorState.of(tensor))
            or (copy is not None and not _same_bits(tensor, copy))
            for tensor, state, copy in self._tensors
        )


class _TensorState(NamedTuple):
    version: int | None
    requires_grad: bool
    grad: Tensor | None
    grad_version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorState:
        grad = grad_or_none(tensor)
        grad_version = None if grad is None else _version(grad)
        return cls(_version(tensor), tensor.requires_grad, grad, grad_version)

    def same(self, other: _TensorState) -> bool:
        return self.grad is other.grad and self._replace(grad=None) == other._replace(grad=None)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _inference_copy(tensor: Tensor) -> Tensor | None:
    """A copy of a CPU tensor that has no version counter."""
    return tensor.clone() if tensor.is_cpu and tensor.is_inference() else None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and all(
        x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y))  # as bytes, NaN equals NaN
        for x, y in zip(parts_of(a), parts_of(b), strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_node(before: Node, now: Node) -> bool:
    """Whether a container holds the same objects, apart from lazily computed attributes."""
    lazy = _lazy_keys(before, now) if has_record_stream(type(now.value)) else set()
    return _ids(before, lazy) == _ids(now, lazy)


def _ids(node: Node, ignored: set[Any]) -> list[tuple[int, int]]:
    """The ids of keys and children, in order; sequences have no keys."""
    items = zip_longest(node.keys, node.children)
    return [(id(key), id(child)) for key, child in items if key not in ignored]


def _lazy_keys(before: Node, now: Node) -> set[Any]:
    """Private attributes that did not exist before, or were None."""
    known = dict(zip(before.keys, before.children, strict=False))
    return {key for key in now.keys if key.startswith("_") and known.get(key) is None}
