"""A stage's backward pass in two parts: the gradients of its inputs first, of its weights later.

    outputs ─ ... ─ n ─ ... ─ inputs        n: a node on the way to the inputs, with an edge that
                    └─ ... ─ weights           leaves this way: there I keeps what W begins with

``I`` runs the nodes on the way to the inputs, and keeps the gradients that come to each n. ``W`` is
a backward pass from each n to its leaves, so that gradients are added, and hooks called, by
autograd itself, and nothing is computed again between one n and the next. Where several n lead to
one leaf, they have one pass, in which their contributions are added as in the whole. What I keeps
is then given to each n again, whatever has come to it from above: a node below another one would
get a part of its gradient twice.

A node n runs in both parts. One that is written in Python may do more than give gradients (add to
``.grad`` itself, as fused kernels do), and a compiled one computes everything each time; under
reentrant checkpoints autograd computes no gradients of chosen inputs at all. A backward pass with
such a node is not split: I does the whole of it, and W nothing.
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
"""Where a backward pass begins, and with which gradient."""

_REENTRANT: Any = CheckpointFunction._backward_cls


@dataclass(slots=True)
class WeightPass:
    """What W has still to do.

    Attributes:
        roots: Outputs on which no input depends.
        kept: Node on the way to the inputs, to what came to it.
        below: Where each of these backward passes begins, to the leaves that it leads to.
    """

    roots: list[Root]
    kept: dict[Node, Grads]
    below: dict[Node, set[Tensor]]

    def run(self) -> None:
        """Add to the gradients of all leaves but the stage's inputs."""
        edges: dict[Node, list[Root]] = {}
        for edge, grad in self.roots:
            edges.setdefault(edge.node, []).append((edge, grad))
        for node, kept in self.kept.items():
            edges[node] = [(GradientEdge(node, i), g) for i, g in enumerate(kept) if g is not None]
        handles = [node.register_prehook(partial(_again, g)) for node, g in self.kept.items()]
        self.kept = {}
        try:
            for nodes, leaves in _apart({node: self.below[node] for node in edges}):
                begins = [one for node in nodes for one in edges[node]]
                if begins and leaves:
                    roots, grads = zip(*begins, strict=True)
                    several = len(nodes) > 1  # whose pass goes through nodes of others
                    torch.autograd.backward(roots, grads, retain_graph=several, inputs=list(leaves))
        finally:
            for handle in handles:
                handle.remove()


def _apart(below: dict[Node, set[Tensor]]) -> list[tuple[list[Node], set[Tensor]]]:
    """Groups of nodes that have no leaf in common; those of several nodes first."""
    groups: list[tuple[list[Node], set[Tensor]]] = []
    for node, leaves in below.items():
        nodes, found = [node], set(leaves)
        for group in [one for one in groups if not leaves.isdisjoint(one[1])]:
            groups.remove(group)
            nodes, found = [*group[0], *nodes], found | group[1]
        groups.append((nodes, found))
    return sorted(groups, key=lambda group: -len(group[0]))


def input_pass(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[Grads, WeightPass | None]:
    """Compute the gradients of a stage's inputs.

    Args:
        outputs: What the stage gave; or its loss.
        grads: Their gradients; None for a loss.
        inputs: What the stage was given: leaves, and values that are no tensors.

    Returns:
        The gradients of the inputs; and what is left for W, None where all is done.
    """
    roots, ours = _roots(outputs, grads), _requiring(inputs)
    ends = {get_gradient_edge(one).node for one in ours}
    graph = _Graph([edge.node for edge, _ in roots], ends)
    if not graph.can_be_split:
        return whole_pass(outputs, grads, inputs), None
    found: dict[int, Tensor | None] = {}
    kept: dict[Node, Grads] = {}
    handles = [node.register_prehook(partial(_keep, kept, node)) for node in graph.branches]
    on_way = graph.above | ends  # a stage may give what it was given
    above = [root for root in roots if root[0].node in on_way]
    try:
        if above:
            edges, values = zip(*above, strict=True)
            results = torch.autograd.grad(edges, ours, values, retain_graph=True, allow_unused=True)
            found = {id(one): grad for one, grad in zip(ours, results, strict=True)}
    finally:
        for handle in handles:
            handle.remove()
    alone = [root for root in roots if root[0].node not in on_way]
    begins = [*(edge.node for edge, _ in alone), *graph.branches]
    left = WeightPass(alone, kept, {node: _leaves_below(node, on_way) for node in begins})
    _let_go(outputs)
    return tuple(found.get(id(one)) for one in inputs), left


def whole_pass(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> Grads:
    """Compute the gradients of a stage's inputs, and add to those of its weights.

    Arguments, and gradients of the inputs, as of ``input_pass``.
    """
    roots, ours = _roots(outputs, grads), _requiring(inputs)
    before = [one.grad for one in ours]
    found: dict[int, Tensor] = {}
    # A hook sees the gradient with the strides that it comes with; ``.grad`` has the input's.
    handles = [
        one.register_hook(partial(found.__setitem__, id(one)))  # type: ignore[no-untyped-call]
        for one in ours
    ]
    try:
        if roots:
            edges, values = zip(*roots, strict=True)
            torch.autograd.backward(edges, values)
    finally:
        for handle in handles:
            handle.remove()
    for one, grad in zip(ours, before, strict=True):
        one.grad = grad
    _let_go(outputs)
    return tuple(found.get(id(one)) for one in inputs)


def _roots(outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> list[Root]:
    given = [torch.ones_like(one) for one in outputs] if grads is None else grads
    return [
        (get_gradient_edge(output), grad)
        for output, grad in zip(outputs, given, strict=True)
        if output.requires_grad and grad is not None
    ]


def _requiring(inputs: Sequence[Any]) -> list[Tensor]:
    return [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]


def _let_go(outputs: Sequence[Tensor]) -> None:
    """Of what is above the nodes that are kept; a view cannot be detached in place."""
    for output in outputs:
        if not output._is_view():
            output.detach_()


class _Graph:
    """What of an autograd graph decides how it is split.

    Attributes:
        above: The nodes on a way to the inputs.
        branches: Those of them with an edge that leaves all such ways.
        can_be_split: Whether the two parts do what the whole does.
    """

    def __init__(self, roots: Sequence[Node], inputs: set[Node]) -> None:
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
    """What gets a gradient from a node, but by the way to the inputs."""
    leaves, seen, todo = set(), set(on_way), [begin]
    while todo:
        node = todo.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        below = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(below)
        todo += below
    return leaves


def _keep(kept: dict[Node, Grads], node: Node, grads: Grads) -> None:
    kept[node] = grads


def _again(kept: Grads, grads: Grads) -> Grads:
    return kept
