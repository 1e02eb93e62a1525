"""Put kept tensors into the autograd graph, in the place of those that a task would have made.

As it would have been, and as it is::

    upstream ----> task ----> output ----> downstream

    upstream <---- zeros ----+
                        _GraftGrad <---- gradient ---- downstream
    kept tensor <- gradient -+

Upstream parameters so stay in the graph: their gradients are zeros, not None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from swpipe._tensors.pytree import tensors_in

Edge: TypeAlias = tuple[Node, int]
"""Where a tensor hangs in the autograd graph: a node, and which of its outputs."""


class _GraftGrad(torch.autograd.Function):
    """Forward: kept tensors, unchanged. Backward: their gradients as they come, and the zeros.

    The arguments are the zeros (one per upstream tensor), the number of kept tensors, the kept
    tensors and the upstream tensors. The zeros go out even when only some of the outputs are used.
    """

    @staticmethod
    def forward(
        graft: Any, zeros: tuple[Tensor, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        graft.zeros = zeros
        graft.set_materialize_grads(False)
        # Not the inputs themselves: autograd would take the outputs for views and bar in-place use.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(graft: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *gradients, *graft.zeros)


def graft(
    kept: Sequence[Tensor], upstream: Sequence[Tensor], zeros: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """``kept``, without a copy, as outputs of a graph that goes on to ``upstream``.

    Args:
        kept: Tensors that do not require grad, of a floating or complex type.
        upstream: Tensors that require grad; there may be none.
        zeros: One per upstream tensor, of its shape, type and device; not written to.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in kept]
    apply: Any = _GraftGrad.apply
    outputs: tuple[Tensor, ...] = apply(tuple(zeros), len(leaves), *leaves, *upstream)
    return outputs


class _Zero(NamedTuple):
    tensor: Tensor
    version: int


class Zeros:
    """Zero gradients, made once and handed out again for as long as they fit."""

    def __init__(self) -> None:
        self._kept: list[_Zero] = []
        self._stream: Any = None

    def like(self, upstream: Sequence[Tensor], stream: Any) -> tuple[Tensor, ...]:
        """Zeros of the shapes, types and devices of ``upstream``.

        Args:
            upstream: The tensors whose gradients they are to be.
            stream: The current stream. Zeros made on another, which may be late, are made anew.
        """
        old = self._kept if stream == self._stream else []
        self._kept = [
            old[k] if k < len(old) and _fits(old[k], tensor) else _fresh(tensor)
            for k, tensor in enumerate(upstream)
        ]
        self._stream = stream
        return tuple(zero.tensor for zero in self._kept)


def _fresh(tensor: Tensor) -> _Zero:
    zero = torch.zeros_like(tensor.detach())
    return _Zero(zero, zero._version)


def _fits(zero: _Zero, tensor: Tensor) -> bool:
    return (
        type(zero.tensor) is Tensor
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and zero.tensor.layout is tensor.layout is torch.strided
        and zero.tensor.shape == tensor.shape
        and zero.tensor.dtype == tensor.dtype
        and zero.tensor.device == tensor.device
        # A hook may have modified the gradient that it was given.
        and zero.tensor._version == zero.version
    )


def edges_of(attributes: Mapping[str, Any]) -> dict[Edge, str]:
    """Where the tensors in ``attributes`` that require grad hang; the attribute of each."""
    edges: dict[Edge, str] = {}
    for name, value in attributes.items():
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                edges.setdefault(_edge_of(tensor), name)
    return edges


def reached(outputs: Iterable[Tensor], edges: Mapping[Edge, str]) -> frozenset[str]:
    """The attributes that the graph of ``outputs`` comes to first, on any path backwards."""
    names: set[str] = set()
    passed: set[Node] = set()
    ahead = [_edge_of(tensor) for tensor in outputs if tensor.requires_grad]
    while ahead:
        edge = ahead.pop()
        if edge in edges:
            names.add(edges[edge])
        elif edge[0] not in passed:
            passed.add(edge[0])
            ahead += [(node, index) for node, index in edge[0].next_functions if node is not None]
    return frozenset(names)


def _edge_of(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
