"""Cuts the autograd graph between the tables and the dense part, and resumes backward there.

    forward    tables ─ look up ─ Req ~~~ exchange ~~~ Wait ─ output │ leaf ─ dense part ─ loss

    backward   tables <─────────── Req ~~~ exchange ~~~ Wait <──────── leaf.grad <───────── loss
               └──── EmbBackward ────┘                 └ started as soon as possible ┘

The dense backward leaves a gradient in each leaf. When a module's last leaf has its gradient, the
exchange of these gradients starts. It overlaps the rest of the dense backward and every task before
``EmbBackward``. TorchRec's own graph waits for the exchange at once, unless the model calls its
tables first.

Without an exchange (one rank, or data-parallel tables), or if some leaf has no gradient, the whole
embedding backward runs in ``EmbBackward``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from swpipe.tasks.torchrec._torchrec import EXCHANGES

Root: TypeAlias = Tensor | GradientEdge

_EXCHANGES = frozenset(f"{cls.__name__}Backward" for cls in EXCHANGES)


class Seam:
    """The cut at one module's embeddings, for the batch of one iteration."""

    same_in_replay = True

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self._cuts: list[tuple[Tensor, Tensor]] = []
        self._gradients = 0
        self._started: tuple[tuple[Root, Tensor], ...] = ()

    def cut(self, output: Tensor) -> Tensor:
        """Return the same values as a leaf of the dense part's graph."""
        if not output.requires_grad:
            return output
        leaf = output.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        self._cuts.append((output, leaf))
        return leaf

    def take(self) -> Iterator[tuple[Root, Tensor]]:
        """Yield the roots of the embedding backward with their gradients, and clear both."""
        cuts = self._cuts
        started = self._started
        self._cuts = []
        self._started = ()
        # If the exchange has started, backward continues at its edges. Otherwise it begins at the
        # outputs; leaves without a gradient were not used by the loss.
        if started:
            yield from started
        else:
            yield from ((output, leaf.grad) for output, leaf in cuts if leaf.grad is not None)

    def _on_gradient(self, leaf: Tensor) -> None:
        # Runs inside the dense backward, when the gradient of a leaf is complete.
        self._gradients += 1
        if self._gradients == len(self._cuts):
            self._start_exchange()

    def _start_exchange(self) -> None:
        edges = _exchanges(output.grad_fn for output, _ in self._cuts)
        if edges:
            outputs = [output for output, _ in self._cuts]
            # Backward from the outputs to the exchanges only: the nodes in between start the
            # exchange of the gradients. The embedding backward waits for it, and continues from
            # these edges.
            gradients = torch.autograd.grad(outputs, edges, [leaf.grad for _, leaf in self._cuts])
            self._started = tuple(zip(edges, gradients, strict=True))


def run_embedding_backward(seams: Iterable[Seam]) -> None:
    """Run the embedding backward of all modules together."""
    taken = [pair for seam in seams for pair in seam.take()]
    if taken:
        # One call, so that autograd runs the modules' graphs as one graph.
        roots, gradients = zip(*taken, strict=True)
        torch.autograd.backward(roots, gradients)


def _exchanges(nodes: Iterable[Any]) -> tuple[GradientEdge, ...]:
    """Return edges to the exchanges that end all paths down the graph; () if a path has none."""
    exchanges: dict[Any, None] = {}
    ahead = [node for node in nodes if node is not None]
    visited = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() in _EXCHANGES:
            exchanges[node] = None
            continue
        below = [child for child, _ in node.next_functions if child is not None]
        if not below:
            # A path that ends without an exchange: its gradients have to be computed in
            # EmbBackward.
            return ()
        ahead += [child for child in below if child not in visited]
        visited.update(below)
    return tuple(GradientEdge(node, 0) for node in exchanges)
