"""What a task did to its context: attributes added, rebound, deleted, or modified in place.

An attribute counts as modified in place when, anywhere inside it,

- a container holds other objects, or holds them under other names;
- a tensor's version counter has moved (views and ``detach()`` share it, ``.data`` does not), it
  requires grad where it did not, or its ``.grad`` is another one or was modified;
- a tensor on the host without a version counter (made in inference mode) holds other numbers. On
  a device it may be under way on another stream, and is not looked at.

Not seen: what happens inside leaves (see ``swpipe._tensors.pytree``): arrays, objects of plain
classes.

Not counted: the content of parameters, which belongs to their module; what an object with a
``record_stream`` method works out when asked, and keeps in a private attribute that was None; and
attributes that only other threads set or deleted (``swpipe.shortcut.bindings``). What other threads
modify in place meanwhile cannot be told apart: tasks that run at the same time let each other's be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._tensors.containers import has_record_stream
from swpipe._tensors.pytree import Node, nodes_in, open_node, parts_of, tensors_in
from swpipe.shortcut.bindings import Bindings


class Changes(NamedTuple):
    """Names of attributes.

    Attributes:
        produced: Added, rebound or modified in place.
        deleted: Gone.
    """

    produced: tuple[str, ...]
    deleted: tuple[str, ...]


class Watch:
    """Watches what happens to a context within a ``with`` block, on the thread that enters it.

    Attributes:
        before: The attributes at its beginning.
        changes: What was done to them; set at its end.
    """

    changes: Changes

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._bindings = Bindings(ctx)
        self.before: dict[str, Any] = {}
        self._contents: dict[str, _Content] = {}

    def __enter__(self) -> Watch:
        self._bindings.__enter__()
        # Copied at one stroke: other threads may set attributes at any moment.
        self.before = dict(vars(self._ctx))
        # The values are held on to: of an object that is gone, the id might come back with another.
        self._contents = {name: _Content(value) for name, value in self.before.items()}
        return self

    def __exit__(self, *failure: object) -> None:
        after = dict(vars(self._ctx))
        self._bindings.__exit__()
        before, foreign = self._contents, self._bindings.only_by_others
        produced = tuple(
            name
            for name, value in after.items()
            if (name not in before or before[name].value is not value or before[name].modified())
            and not foreign(name)
        )
        deleted = tuple(name for name in before if name not in after and not foreign(name))
        self.changes = Changes(produced, deleted)


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
        return any(not same_node(node, open_node(node.value)) for node in self._nodes) or any(
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
            tensor.clone() if version is None and tensor.is_cpu else None,
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


def same_node(before: Node, now: Node) -> bool:
    """Whether a container holds what it held, but for what it works out lazily when asked."""
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
