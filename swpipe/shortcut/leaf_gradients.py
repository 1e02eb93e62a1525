"""Leaves of the autograd graph that a shortcut task used, and their gradients.

A replay gives zero gradients to the leaves whose gradient the task computed, directly or in
backward. An optimizer, a gradient scaler or a clipping of norms then does the same work as without
the shortcut. A parameter that got no gradient in the cached run, such as the weights of a table
with a fused optimizer, gets none in replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from swpipe._values.fingerprint import TensorState
from swpipe._values.walk import parts_of, tensors_in

GradientEdge: TypeAlias = tuple[Node, int]
"""A tensor's position in the autograd graph: a node, and the index of one of its outputs."""


def _pattern(gradient: Tensor, leaf: Tensor) -> Tensor:
    """Return a tensor of which ``torch.zeros_like`` makes zeros that are stored like a gradient."""
    # Zeros like a sparse tensor are sparse: they have no element, and its sparse dimensions.
    return torch.zeros_like(gradient) if gradient.layout is torch.sparse_coo else leaf


class OwnLeaf:
    """A leaf that a task used and that is no attribute, such as a parameter of its module.

    The leaf is watched until the backward of the cached run, which may follow much later.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._pattern: Tensor | None = None
        # A hook, since whether the leaf gets a gradient, and a sparse one, shows only in the
        # backward.
        register: Any = tensor.register_hook
        self._hook = register(self._see)

    def zero(self) -> Tensor | None:
        """Return a new gradient of zeros like the cached run's, or None if it had none."""
        # There is no pattern if no gradient has come: the cached run's backward gave none or has
        # yet to run.
        if self._pattern is None or _memory_is_released(self.tensor):
            return None
        return torch.zeros_like(self._pattern.detach())

    def close(self) -> None:
        """Stop watching the leaf."""
        self._hook.remove()

    def _see(self, gradient: Tensor | None) -> None:
        """Note how the gradient is stored, and stop watching."""
        if gradient is not None:
            self._pattern = _pattern(gradient, self.tensor)
            self._hook.remove()


class LeafGradients:
    """The gradients of all leaves behind the tensors in a value, before a task."""

    def __init__(self, value: Any) -> None:
        given = list(tensors_in(value))
        known = {id(tensor) for tensor in given}
        leaves = find_sources(given, {}).leaves
        self._before = [TensorState(leaf) for leaf in leaves if id(leaf) not in known]

    def changed(self) -> list[LeftGradient]:
        """Return the gradients that the task set or added to."""
        return [
            LeftGradient(before.tensor, _pattern(before.tensor.grad, before.tensor))
            for before in self._before
            if before.tensor.grad is not None and before.grad_changed()
        ]


class LeftGradient(NamedTuple):
    """A gradient that a task left at a leaf that is no attribute."""

    leaf: Tensor
    pattern: Tensor

    def restore(self) -> None:
        """Set a missing gradient to zeros."""
        if self.leaf.grad is None and self.leaf.requires_grad:
            self.leaf.grad = torch.zeros_like(self.pattern.detach())


class Sources(NamedTuple):
    """The tensors that outputs were computed from: attributes of the context, and other leaves."""

    attributes: tuple[str, ...]
    leaves: tuple[Tensor, ...]


def gradient_edges(attributes: Mapping[str, Any]) -> dict[GradientEdge, str]:
    """Return the edges of the tensors in ``attributes`` that require grad.

    Each edge comes with the first attribute that has it.
    """
    edges: dict[GradientEdge, str] = {}
    for name, value in attributes.items():
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                edges.setdefault(_edge_of(tensor), name)
    return edges


def find_sources(outputs: Iterable[Tensor], edges: Mapping[GradientEdge, str]) -> Sources:
    """Return the first source on each path backwards through the graph of ``outputs``.

    ``edges`` are those of attributes, see ``gradient_edges``.
    """
    names: set[str] = set()
    leaves: list[Tensor] = []
    visited: set[Node] = set()
    # A stack and not recursion: graphs can be deeper than Python's recursion limit.
    stack = [_edge_of(tensor) for tensor in outputs if tensor.requires_grad]
    while stack:
        edge = stack.pop()
        node = edge[0]
        # Not searched beyond an attribute: its own graph leads on from there.
        if edge in edges:
            names.add(edges[edge])
        elif node not in visited:
            visited.add(node)
            stack += [(next_, index) for next_, index in node.next_functions if next_ is not None]
            if hasattr(node, "variable"):  # the node that accumulates the gradient of a leaf
                leaves.append(node.variable)
    return Sources(tuple(sorted(names)), tuple(leaves))


def _edge_of(tensor: Tensor) -> GradientEdge:
    """Return a tensor's position in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _memory_is_released(tensor: Tensor) -> bool:
    """Return whether sharding has released the memory of a parameter until its next use."""
    return tensor.numel() > 0 and any(
        part.layout is torch.strided and not part.is_meta and not part.untyped_storage().size()
        for part in parts_of(tensor)
    )
