"""Insertion of cached tensors into the autograd graph, in place of tensors that a task computes.

With the task running, and with cached tensors instead::

    upstream ----> task ----> output ----> downstream

    upstream <------- zeros -----+
    task's parameters <- zeros --+
                            _GraftGrad <---- gradient ---- downstream
    cached tensor <-- gradient --+

Parameters upstream and in the task therefore stay in the graph: their gradients are zeros, not
None.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from swpipe._values.walk import tensors_in
from swpipe.errors import ShortcutError
from swpipe.shortcut.leaf_gradients import OwnLeaf

GradientEdge: TypeAlias = tuple[Node, int]
"""A tensor's position in the autograd graph: a node, and the index of one of its outputs."""


class Spent:
    """A count of the seconds spent on work that only a replay has to do."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _GraftGrad(torch.autograd.Function):
    """The autograd function in place of a replayed task.

    Forward returns the cached tensors. Backward returns their gradients, and zeros for upstream
    tensors. The inputs are the cached tensors, ``count`` of them, then the upstream ones and the
    leaves. Zeros are returned even if only some outputs are used.
    """

    @staticmethod
    def forward(
        graft: Any,
        zeros: tuple[Tensor, ...],
        leaves: tuple[OwnLeaf, ...],
        task: str,
        spent: Spent,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        graft.zeros = zeros
        graft.leaves = leaves
        graft.task = task
        graft.spent = spent
        # An unused output gets None as its gradient, and no tensor of zeros is allocated for it.
        graft.set_materialize_grads(False)
        # Not the inputs themselves: autograd treats those as views and forbids in-place changes.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(graft: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise ShortcutError(
                graft.task,
                "a gradient of its outputs is itself differentiated (create_graph=True), and a "
                "replay has no second derivative. Compute outputs and gradient in one task, or "
                "do not shortcut this one",
            )
        begin_s = time.perf_counter()
        own = [leaf.zero() for leaf in graft.leaves]
        graft.spent.seconds += time.perf_counter() - begin_s
        # One entry for each argument of forward: the first five are no tensors.
        return (None, None, None, None, None, *gradients, *graft.zeros, *own)


def connect(
    cached: Sequence[Tensor],
    upstream: Sequence[Tensor],
    zeros: Sequence[Tensor],
    leaves: Sequence[OwnLeaf] = (),
    task: str = "",
    spent: Spent | None = None,
) -> tuple[Tensor, ...]:
    """Return ``cached``, without a copy, as outputs of a graph that leads to ``upstream``.

    Args:
        cached: Tensors of a floating or complex type that do not require grad.
        upstream: Tensors that require grad; may be empty.
        zeros: One per upstream tensor, of its shape, dtype and device; not written to.
        leaves: Leaves that the task used.
        task: The name of the task, for messages.
        spent: Counts the seconds that each backward takes for the zeros of ``leaves``.
    """
    # The cached tensors require grad here, so that autograd records the node even without upstream.
    inputs = [tensor.detach().requires_grad_() for tensor in cached]
    inputs += [*upstream, *(leaf.tensor for leaf in leaves)]
    apply: Any = _GraftGrad.apply
    given = (tuple(zeros), tuple(leaves), task, spent or Spent(), len(cached))
    outputs: tuple[Tensor, ...] = apply(*given, *inputs)
    return outputs


class ZeroGradients:
    """Zero gradients, reused while they match the tensors they are for."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int]] = []  # with version counters
        self._stream: Any = None

    def like(self, upstream: Sequence[Tensor], stream: Any) -> tuple[Tensor, ...]:
        """Return zeros like ``upstream``.

        Zeros made under another current ``stream`` are not reused.
        """
        # Memory of another stream could be read here before that stream has filled it.
        old = self._kept if stream == self._stream else []
        self._kept = [
            old[k] if k < len(old) and _matches(*old[k], tensor) else _fresh(tensor)
            for k, tensor in enumerate(upstream)
        ]
        self._stream = stream
        return tuple(zero for zero, _ in self._kept)


def _fresh(tensor: Tensor) -> tuple[Tensor, int]:
    """Return new zeros like a tensor, and their version counter."""
    zero = torch.zeros_like(tensor.detach())
    return zero, zero._version


def _matches(zero: Tensor, version: int, tensor: Tensor) -> bool:
    """Return whether zeros can be reused as the gradient of a tensor."""
    a, b = ((t.layout, t.shape, t.dtype, t.device) for t in (zero, tensor))
    return (
        type(zero) is Tensor
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and a == b
        and tensor.layout is torch.strided
        and zero._version == version  # no hook has modified the gradient in place
    )


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


class Sources(NamedTuple):
    """The tensors that outputs were computed from: attributes of the context, and own leaves."""

    attributes: tuple[str, ...]
    leaves: tuple[OwnLeaf, ...] = ()

    def close(self) -> None:
        """Stop waiting for the gradients of the cached run."""
        for leaf in self.leaves:
            leaf.close()


def find_sources(
    outputs: Iterable[Tensor], edges: Mapping[GradientEdge, str], made: Sequence[Tensor] = ()
) -> Sources:
    """Return the first source on each path backwards through the graph of ``outputs``.

    Args:
        outputs: Tensors.
        edges: The edges of attributes, see ``gradient_edges``.
        made: Leaves among these are not sources.
    """
    names: set[str] = set()
    leaves: dict[int, Tensor] = {}
    visited: set[Node] = set()
    stack = [_edge_of(tensor) for tensor in outputs if tensor.requires_grad]
    while stack:
        edge = stack.pop()
        # Not searched beyond an attribute: its own graph leads on from there.
        if edge in edges:
            names.add(edges[edge])
        elif edge[0] not in visited:
            visited.add(edge[0])
            stack += [(node, index) for node, index in edge[0].next_functions if node is not None]
            # Only the node that accumulates a leaf's gradient has this attribute.
            leaf = getattr(edge[0], "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
    own = [leaf for key, leaf in leaves.items() if not any(leaf is tensor for tensor in made)]
    return Sources(tuple(sorted(names)), tuple(map(OwnLeaf, own)))


def _edge_of(tensor: Tensor) -> GradientEdge:
    """Return a tensor's position in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
