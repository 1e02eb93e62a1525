"""Where a step's graph is cut between the embedding half and the dense half, and how it goes on.

    forward    tables ─ look up ─ Req ~~~ exchange ~~~ Wait ─ output │ leaf ─ dense half ─ loss

    backward   tables <─────────── Req ~~~ exchange ~~~ Wait <──────── leaf.grad <───────── loss
               └──── EmbBackward ────┘                 └ begun as soon as it is there ┘

The dense half's backward leaves a gradient in each leaf. Once a module's last leaf has its own, in
the middle of that backward, the exchange of these gradients is begun: what is left of the dense
half's backward, and every task before ``EmbBackward``, then hides it. TorchRec's own graph waits
for the exchange on the spot, unless the model happens to call its tables first.

A graph that reaches tables without an exchange between them (one rank, or data-parallel tables) is
left in one piece, and so is one of whose leaves some got no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from swpipe.tasks.sparse_dist._torchrec import EXCHANGES

Root: TypeAlias = Tensor | GradientEdge

_EXCHANGES = frozenset(f"{cls.__name__}Backward" for cls in EXCHANGES)


class Seam:
    """The cut through one module's embeddings, for one batch."""

    def __init__(self) -> None:
        self._cuts: list[tuple[Tensor, Tensor]] = []
        self._arrived = 0
        self._under_way: tuple[tuple[Root, ...], tuple[Tensor, ...]] | None = None

    def cut(self, output: Tensor) -> Tensor:
        """The same numbers as a leaf of the dense half."""
        if not output.requires_grad:
            return output
        leaf = output.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        self._cuts.append((output, leaf))
        return leaf

    def take(self) -> tuple[list[Root], list[Tensor]]:
        """Where the embedding half's backward goes on, and with which gradients; given once."""
        if self._under_way is not None:
            roots, gradients = self._under_way
        else:
            used = [(output, leaf.grad) for output, leaf in self._cuts if leaf.grad is not None]
            roots = tuple(output for output, _ in used)
            gradients = tuple(gradient for _, gradient in used)
        self._cuts, self._under_way = [], None
        return list(roots), list(gradients)

    def _arrive(self, leaf: Tensor) -> None:
        self._arrived += 1
        if self._arrived == len(self._cuts):
            self._begin()

    def _begin(self) -> None:
        edges = _exchanges(output.grad_fn for output, _ in self._cuts)
        if edges:
            outputs = [output for output, _ in self._cuts]
            gradients = torch.autograd.grad(outputs, edges, [leaf.grad for _, leaf in self._cuts])
            self._under_way = (edges, gradients)


def go_on(seams: Iterable[Seam]) -> None:
    """The embedding half's backward, of all modules together."""
    roots: list[Root] = []
    gradients: list[Tensor] = []
    for seam in seams:
        more_roots, more_gradients = seam.take()
        roots += more_roots
        gradients += more_gradients
    if roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]


def _exchanges(nodes: Iterable[Any]) -> tuple[GradientEdge, ...]:
    """The exchanges that all ways down the graph come to; none if some way has none."""
    found: dict[Any, None] = {}
    ahead = [node for node in nodes if node is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() in _EXCHANGES:
            found[node] = None
            continue
        below = [child for child, _ in node.next_functions if child is not None]
        if not below:
            return ()
        ahead += [child for child in below if child not in seen]
        seen.update(below)
    return tuple(GradientEdge(node, 0) for node in found)
