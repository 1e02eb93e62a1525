"""Insert cached tensors into the autograd graph, in place of those the task would have computed.

With the task running, and with cached tensors instead::

    upstream ----> task ----> output ----> downstream

    upstream <---- zeros ----+
                        _GraftGrad <---- gradient ---- downstream
    cached tensor <- gradient -+

So upstream parameters stay in the graph: their gradients are zeros, not None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from swpipe._tensors.pytree import tensors_in

Edge: TypeAlias = tuple[Node, int]
"""A tensor's position in the autograd graph: a node, and the index of one of its outputs."""


class _GraftGrad(torch.autograd.Function):
    """Forward: the cached tensors. Backward: their gradients, and zeros for upstream tensors.

    The arguments are the zeros (one per upstream tensor), the number of cached tensors, the cached
    tensors and the upstream tensors. Zeros are returned even if only some outputs are used.
    """

    @staticmethod
    def forward(
        graft: Any, zeros: tuple[Tensor, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        graft.zeros = zeros
        graft.set_materialize_grads(False)
        # Not the inputs themselves: autograd treats those as views and forbids in-place changes.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(graft: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *gradients, *graft.zeros)


def connect(
    cached: Sequence[Tensor], upstream: Sequence[Tensor], zeros: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``cached``, without a copy, as outputs of a graph that leads to ``upstream``.

    Args:
        cached: Tensors of a floating or complex type that do not require grad.
        upstream: Tensors that require grad; may be empty.
        zeros: One per upstream tensor, of its shape, dtype and device; not written to.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in cached]
    apply: Any = _GraftGrad.apply
    outputs: tuple[Tensor, ...] = apply(tuple(zeros), len(leaves), *leaves, *upstream)
    return outputs


class ZeroGradients:
    """Zero gradients, reused while they match the tensors they are for."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int]] = []  # with version counters
        self._stream: Any = None

    def like(self, upstream: Sequence[Tensor], stream: Any) -> tuple[Tensor, ...]:
        """Zeros like ``upstream``. Those made under another current ``stream`` are not reused."""
        old = self._kept if stream == self._stream else []
        self._kept = [
            old[k] if k < len(old) and _matches(*old[k], tensor) else _fresh(tensor)
            for k, tensor in enumerate(upstream)
        ]
        self._stream = stream
        return tuple(zero for zero, _ in self._kept)


def _fresh(tensor: Tensor) -> tuple[Tensor, int]:
    zero = torch.zeros_like(tensor.detach())
    return zero, zero._version


def _matches(zero: Tensor, version: int, tensor: Tensor) -> bool:
    a, b = ((t.layout, t.shape, t.dtype, t.device) for t in (zero, tensor))
    return (
        type(zero) is Tensor
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and a == b
        and tensor.layout is torch.strided
        and zero._version == version  # no hook has modified the gradient in place
    )


def gradient_edges(attributes: Mapping[str, Any]) -> dict[Edge, str]:
    """The edges of the tensors in ``attributes`` that require grad, with the attribute of each."""
    edges: dict[Edge, str] = {}
    for name, value in attributes.items():
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                edges.setdefault(_edge_of(tensor), name)
    return edges


def nearest_attributes(outputs: Iterable[Tensor], edges: Mapping[Edge, str]) -> frozenset[str]:
    """The attributes found first on each path backwards through the graph of ``outputs``."""
    names: set[str] = set()
    visited: set[Node] = set()
    stack = [_edge_of(tensor) for tensor in outputs if tensor.requires_grad]
    while stack:
        edge = stack.pop()
        if edge in edges:
            names.add(edges[edge])
        elif edge[0] not in visited:
            visited.add(edge[0])
            stack += [(node, index) for node, index in edge[0].next_functions if node is not None]
    return frozenset(names)


def _edge_of(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
