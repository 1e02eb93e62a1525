"""A stage's backward pass in two parts: I, the gradients of its inputs, and W, of its weights.

    outputs ─ ... ─ n ─ ... ─ inputs        n: a branch node, which lies on a path to the inputs and
                    └─ ... ─ weights           has an edge that leaves all of these paths

``I`` runs the nodes on the paths to the inputs, and keeps the gradients that arrive at each branch
node. ``W`` runs a backward pass from each branch node to its leaves, with the kept gradients.
Autograd itself adds the gradients and calls the hooks, and no node between two branch nodes runs
again. Branch nodes that lead to the same leaf share one backward pass, in which autograd adds their
contributions in the order of the undivided pass. In a shared pass, a branch node below another one
would get the gradient from above a second time. Therefore each branch node is given exactly the
kept gradients, whatever arrives.

A branch node runs in both parts. A node written in Python may have side effects (fused kernels add
to ``.grad`` themselves), a compiled node computes all its gradients each time, and under reentrant
checkpoints autograd cannot compute the gradients of chosen inputs. A backward pass with these nodes
is not split: I runs all of it, and W does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

Grads: TypeAlias = tuple[Tensor | None, ...]
Root: TypeAlias = tuple[GradientEdge, Tensor]
"""The start of a backward pass, and the gradient there."""

# The autograd node of a reentrant checkpoint; ``_backward_cls`` is private in torch 2.13 to 2.15.
_REENTRANT: Any = CheckpointFunction._backward_cls


@dataclass(slots=True)
class WeightPass:
    """The part of a backward pass that I has left for W.

    Attributes:
        roots: The outputs that depend on no input, with their gradients.
        kept: The gradients that arrived at each branch node.
        below: The leaves that W reaches from each node where a backward pass starts.
    """

    roots: list[Root]
    kept: dict[Node, Grads]
    below: dict[Node, set[Tensor]]

    def run(self) -> None:
        """Add to the gradients of all leaves except the stage's inputs."""
        edges: dict[Node, list[Root]] = {}
        for edge, grad in self.roots:
            edges.setdefault(edge.node, []).append((edge, grad))
        for node, kept in self.kept.items():
            edges[node] = [(GradientEdge(node, i), g) for i, g in enumerate(kept) if g is not None]
        handles = [node.register_prehook(partial(_again, g)) for node, g in self.kept.items()]
        # The prehooks now hold the kept gradients; a second reference here would keep them in
        # memory until the next step.
        self.kept = {}
        try:
            for nodes, leaves in _apart({node: self.below[node] for node in edges}):
                begins = [root for node in nodes for root in edges[node]]
                if begins and leaves:
                    roots, grads = zip(*begins, strict=True)
                    # The pass of several nodes may run through branch nodes that have a pass of
                    # their own later, and must not free their buffers.
                    several = len(nodes) > 1
                    torch.autograd.backward(roots, grads, retain_graph=several, inputs=list(leaves))
        finally:
            for handle in handles:
                handle.remove()


def _apart(below: dict[Node, set[Tensor]]) -> list[tuple[list[Node], set[Tensor]]]:
    """Return the nodes in groups without common leaves, with groups of several nodes first."""
    # Groups of several nodes come first: their passes retain the graph, which a single node's pass
    # frees.
    groups: list[tuple[list[Node], set[Tensor]]] = []
    for node, leaves in below.items():
        nodes = [node]
        union = set(leaves)
        for group in [group for group in groups if not leaves.isdisjoint(group[1])]:
            groups.remove(group)
            nodes = [*group[0], *nodes]
            union = union | group[1]
        groups.append((nodes, union))
    return sorted(groups, key=lambda group: -len(group[0]))


def input_pass(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[Grads, WeightPass | None]:
    """Compute the gradients of a stage's inputs.

    Args:
        outputs: The outputs of the stage, or its loss.
        grads: The gradients of the outputs; None for a loss.
        inputs: The inputs of the stage: leaf tensors, and values that are not tensors.

    Returns:
        The gradients of the inputs, and the remaining work for W, or None if no work remains.
    """
    roots = _roots(outputs, grads)
    leaves = _requiring(inputs)
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    graph = _Graph([edge.node for edge, _ in roots], ends)
    if not graph.can_be_split:
        return whole_pass(outputs, grads, inputs), None
    grad_of: dict[int, Tensor | None] = {}
    kept: dict[Node, Grads] = {}
    handles = [node.register_prehook(partial(_keep, kept, node)) for node in graph.branches]
    on_way = graph.above | ends  # a stage may return an input unchanged
    above = [root for root in roots if root[0].node in on_way]
    try:
        if above:
            edges, values = zip(*above, strict=True)
            # retain_graph: W runs the branch nodes again.
            results = torch.autograd.grad(
                edges, leaves, values, retain_graph=True, allow_unused=True
            )
            grad_of = {id(leaf): grad for leaf, grad in zip(leaves, results, strict=True)}
    finally:
        for handle in handles:
            handle.remove()
    alone = [root for root in roots if root[0].node not in on_way]
    begins = [*(edge.node for edge, _ in alone), *graph.branches]
    left = WeightPass(alone, kept, {node: _leaves_below(node, on_way) for node in begins})
    _let_go(outputs)
    return tuple(grad_of.get(id(value)) for value in inputs), left


def whole_pass(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> Grads:
    """Compute the gradients of a stage's inputs, and add to the gradients of its weights.

    See ``input_pass`` for the arguments.

    Returns:
        The gradients of the inputs.
    """
    roots = _roots(outputs, grads)
    leaves = _requiring(inputs)
    before = [leaf.grad for leaf in leaves]
    grad_of: dict[int, Tensor] = {}
    # A hook gets the gradient with its own strides; ``.grad`` would have the strides of the input.
    # Kernels choose the order of their sums by the strides.
    handles = [
        leaf.register_hook(partial(grad_of.__setitem__, id(leaf)))  # type: ignore[no-untyped-call]
        for leaf in leaves
    ]
    try:
        if roots:
            edges, values = zip(*roots, strict=True)
            torch.autograd.backward(edges, values)
    finally:
        for handle in handles:
            handle.remove()
    for leaf, grad in zip(leaves, before, strict=True):
        leaf.grad = grad
    _let_go(outputs)
    return tuple(grad_of.get(id(value)) for value in inputs)


def _roots(outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> list[Root]:
    given = [torch.ones_like(output) for output in outputs] if grads is None else grads
    return [
        (get_gradient_edge(output), grad)
        for output, grad in zip(outputs, given, strict=True)
        if output.requires_grad and grad is not None
    ]


def _requiring(inputs: Sequence[Any]) -> list[Tensor]:
    return [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]


def _let_go(outputs: Sequence[Tensor]) -> None:
    """Detach the outputs in place, so that they do not keep the graph above the branch nodes."""
    # torch does not detach views in place; a view keeps its graph until the caller drops it.
    for output in outputs:
        if not output._is_view():
            output.detach_()


class _Graph:
    """The nodes of an autograd graph that determine how its backward pass is split.

    Attributes:
        above: The nodes on a path to the inputs.
        branches: The nodes of ``above`` with an edge that leaves all paths to the inputs.
        can_be_split: Whether I and W together compute the same as the undivided pass.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
        # Reverse the edges: autograd nodes only know their successors.
        users: dict[Node, list[Node]] = {node: [] for node in roots}
        todo = list(users)
        while todo:
            node = todo.pop()
            for below, _ in node.next_functions:
                if below is not None:
                    if below not in users:
                        users[below] = []
                        todo.append(below)
                    users[below].append(node)
        # Walk up from the inputs.
        self.above: set[Node] = set()
        todo = [node for node in inputs if node in users]
        while todo:
            for user in users[todo.pop()]:
                if user not in self.above:
                    self.above.add(user)
                    todo.append(user)
        own = self.above | inputs
        self.branches = [
            node
            for node in users
            if node in self.above
            and any(below is not None and below not in own for below, _ in node.next_functions)
        ]
        self.can_be_split = not any(isinstance(n, BackwardCFunction) for n in self.branches) and (
            not any(isinstance(node, _REENTRANT) for node in users)
        )


def _leaves_below(begin: Node, on_way: set[Node]) -> set[Tensor]:
    """Return the leaves that a node reaches without the nodes on the paths to the inputs."""
    leaves = set()
    visited = set(on_way)
    todo = [begin]
    while todo:
        node = todo.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        below = [n for n, _ in node.next_functions if n is not None and n not in visited]
        visited.update(below)
        todo += below
    return leaves


def _keep(kept: dict[Node, Grads], node: Node, grads: Grads) -> None:
    kept[node] = grads


def _again(kept: Grads, grads: Grads) -> Grads:
    return kept
