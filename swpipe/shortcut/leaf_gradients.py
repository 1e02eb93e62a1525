"""Zero gradients for parameters whose gradient a shortcut task computed, directly or in backward.

An optimizer, a gradient scaler or a clipping of norms then does the same work as without the
shortcut. A parameter that got no gradient in the cached run, such as the weights of a table with a
fused optimizer, gets none in replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from swpipe._values.fingerprint import TensorState
from swpipe._values.walk import parts_of, tensors_in


def _form_of(gradient: Tensor) -> int:
    """Return how a gradient is stored: its number of sparse dimensions, 0 for a dense one."""
    return gradient.sparse_dim() if gradient.layout is torch.sparse_coo else 0


def _zero(leaf: Tensor, form: int) -> Tensor:
    """Return a new gradient of zeros for a leaf."""
    if not form:
        return torch.zeros_like(leaf.detach())
    # Not torch.sparse_coo_tensor, which warns in torch 2.11 that its checks are left out.
    empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device, layout=torch.sparse_coo)
    return empty.sparse_resize_and_clear_(leaf.shape, form, leaf.dim() - form)


class OwnLeaf:
    """A leaf that a task used and that is no attribute, such as a parameter of its module.

    The leaf is watched until the backward of the cached run, which may follow much later.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._form: int | None = None
        # A hook, since whether the leaf gets a gradient, and a sparse one, shows only in the
        # backward.
        register: Any = tensor.register_hook
        self._hook = register(self._see)

    def zero(self) -> Tensor | None:
        """Return a new gradient of zeros like the cached run's, or None if it had none."""
        # The form is None if no gradient has come: the cached run's backward gave none or has yet
        # to run.
        if self._form is None or _memory_is_released(self.tensor):
            return None
        return _zero(self.tensor, self._form)

    def close(self) -> None:
        """Stop watching the leaf."""
        self._hook.remove()

    def _see(self, gradient: Tensor | None) -> None:
        """Note how the gradient is stored, and stop watching."""
        if gradient is not None:
            self._form = _form_of(gradient)
            self._hook.remove()


class LeafGradients:
    """The gradients of all leaves behind the tensors in a value, before a task."""

    def __init__(self, value: Any) -> None:
        given = list(tensors_in(value))
        outputs = (tensor for tensor in given if tensor.requires_grad and not tensor.is_leaf)
        known = {id(tensor) for tensor in given}
        self._before = [
            (leaf, TensorState.of(leaf)) for leaf in leaves_behind(outputs) if id(leaf) not in known
        ]

    def changed(self) -> list[LeftGradient]:
        """Return the gradients that the task set or added to."""
        return [
            LeftGradient(leaf, _form_of(leaf.grad))
            for leaf, before in self._before
            if leaf.grad is not None and not before.same_grad(TensorState.of(leaf))
        ]


class LeftGradient(NamedTuple):
    """A gradient that a task left at a leaf that is no attribute."""

    leaf: Tensor
    form: int

    def restore(self) -> None:
        """Set a missing gradient to zeros."""
        if self.leaf.grad is None and self.leaf.requires_grad:
            self.leaf.grad = _zero(self.leaf, self.form)


def leaves_behind(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all leaves in the graph of ``outputs`` that require grad, each once."""
    visited: set[Node] = set()
    # A stack and not recursion: graphs can be deeper than Python's recursion limit.
    stack: list[Any] = [get_gradient_edge(tensor).node for tensor in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):  # the node that accumulates the gradient of a leaf
            yield node.variable
        stack += [following for following, _ in node.next_functions]


def _memory_is_released(tensor: Tensor) -> bool:
    """Return whether sharding has released the memory of a parameter until its next use."""
    return tensor.numel() > 0 and any(
        part.layout is torch.strided and not part.is_meta and not part.untyped_storage().size()
        for part in parts_of(tensor)
    )
