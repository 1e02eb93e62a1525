"""What a task did to its context: attributes added, rebound, deleted, or modified in place.

``Watch(vars(ctx))`` before the task, ``changes(vars(ctx))`` after it. An attribute counts as
modified in place when, anywhere inside it,

- a container holds other objects, or holds them under other names;
- a tensor's version counter has moved (views and ``detach()`` share it, ``.data`` does not), it
  requires grad where it did not, or its ``.grad`` is another one or was modified;
- a tensor without a version counter (made in inference mode) holds other numbers.

Not seen: what happens inside leaves (see ``swpipe.tree``): arrays, objects of plain classes.

Not counted: the content of parameters, which belongs to their module; and what an object with a
``record_stream`` method works out when first asked, and keeps in a private attribute that was None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe.containers import has_record_stream
from swpipe.tree import Node, nodes_in, open_node, parts_of, tensors_in


class Changes(NamedTuple):
    """Names of attributes.

    Attributes:
        produced: Added, rebound or modified in place.
        deleted: Gone.
    """

    produced: tuple[str, ...]
    deleted: tuple[str, ...]


class Watch:
    """What a context held, for comparison."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        # The values are held on to: of an object that is gone, the id might come back with another.
        self._before = {name: _Content(value) for name, value in attributes.items()}

    def changes(self, attributes: Mapping[str, Any]) -> Changes:
        """What differs in ``attributes`` from what was there at first."""
        before = self._before
        produced = tuple(
            name
            for name, value in attributes.items()
            if name not in before or before[name].value is not value or before[name].modified()
        )
        return Changes(produced, tuple(name for name in before if name not in attributes))


class _Content:
    """All that is in a value: its containers with what they hold, and its tensors' state."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._nodes = tuple(nodes_in(value))
        self._tensors = tuple(
            _TensorState.of(tensor)
            for tensor in tensors_in(value)
            if not isinstance(tensor, Parameter)
        )

    def modified(self) -> bool:
        return any(not _same(node, open_node(node.value)) for node in self._nodes) or any(
            state.moved() for state in self._tensors
        )


class _TensorState(NamedTuple):
    tensor: Tensor
    version: int | None
    requires_grad: bool
    grad: Tensor | None
    grad_version: int | None
    content: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorState:
        grad = grad_of(tensor)
        version = _version(tensor)
        return cls(
            tensor,
            version,
            tensor.requires_grad,
            grad,
            None if grad is None else _version(grad),
            tensor.clone() if version is None else None,
        )

    def moved(self) -> bool:
        grad = grad_of(self.tensor)
        if (
            _version(self.tensor) != self.version
            or self.tensor.requires_grad != self.requires_grad
            or grad is not self.grad
        ):
            return True
        if grad is not None and _version(grad) != self.grad_version:
            return True
        return self.content is not None and not _same_bits(self.tensor, self.content)


def grad_of(tensor: Tensor) -> Tensor | None:
    """A tensor's ``.grad``, without the warning that torch gives where there can be none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and all(
        x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y))  # bytes: NaN is the same as NaN
        for x, y in zip(parts_of(a), parts_of(b), strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same(before: Node, now: Node) -> bool:
    if has_record_stream(type(now.value)):
        before, now = _without_lazy(before, now)
    return _all_same(before.keys, now.keys) and _all_same(before.children, now.children)


def _all_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _without_lazy(before: Node, now: Node) -> tuple[Node, Node]:
    """Both nodes less the private attributes that the first has not, or has as None."""
    known = dict(zip(before.keys, before.children, strict=True))
    lazy = {key for key in now.keys if key.startswith("_") and known.get(key) is None}

    def kept(node: Node) -> Node:
        items = [
            (key, child)
            for key, child in zip(node.keys, node.children, strict=True)
            if key not in lazy
        ]
        return Node(node.value, tuple(key for key, _ in items), tuple(child for _, child in items))

    return kept(before), kept(now)
