"""Protocols of models whose layers schedules can run.

A schedule calls the methods that the model's own forward calls, in another order. A layer needs
``attend`` and ``feed_forward``. A layer with experts on several ranks also needs the three parts of
its ``feed_forward``, and a chunk of a model the embedding and the output around its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn


# Protocols and no base classes, so that models need not import swpipe.
class Exchange(Protocol):
    """An exchange of rows between ranks that was started."""

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the received rows."""


class Routing(Protocol):
    """The destinations of a microbatch's rows; no tensor in it has a gradient."""

    @property
    def tensors(self) -> Iterable[Tensor]:
        """The tensors that ``merge`` reads."""

    def start(self, rows: Tensor, *, to_experts: bool) -> Exchange:
        """Start to send rows to the experts or back; other work overlaps until ``wait``."""


class Routed(NamedTuple):
    """The result of ``route``.

    Attributes:
        rows: The rows to send, (rows, hidden).
        weights: The weights of the experts, for ``merge``.
        normed: The input of the shared expert; None if there is none.
        routing: The destinations of the rows.
    """

    rows: Tensor
    weights: Tensor
    normed: Tensor | None
    routing: Routing


class DecoderLayer(Protocol):
    """A transformer layer. It may have an attribute ``config`` with two options.

    ``delay_wgrad_compute`` delays the weight gradients of ``swpipe.tasks.transformer.Linear`` maps;
    ``ep_overlap_early_attn_memory_release`` lets attention's backward come early (``LayerKind``).
    """

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run attention with its residual, on hidden states in the layout that layers take."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Run the feed-forward part with its residual."""


class MoeLayer(DecoderLayer, Protocol):
    """A layer whose second half sends tokens to experts on other ranks.

    Attributes:
        expert_group: The ranks that share the experts; None for this process alone.
    """

    expert_group: dist.ProcessGroup | None

    # The schedule recognizes a layer with experts by this method.
    def route(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Routed:
        """Choose experts and sort rows by them; may start an exchange of counts.

        ``padding_mask``, (batch, sequence), is True where there is no token.
        """

    def through_experts(
        self, rows: Tensor, normed: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of this rank's experts, and of the shared expert for all tokens."""

    def merge(
        self,
        rows: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        hidden: Tensor,
        routing: Routing,
    ) -> Tensor:
        """Return the hidden state: the sum of returned rows, shared expert and residual."""


class PredictionLayer(Protocol):
    """A layer for multi-token prediction.

    Attributes:
        number: Its number, from 0.
        transformer_layer: The transformer layer in it.
    """

    number: int
    # The schedule recognizes a layer for multi-token prediction by this attribute.
    transformer_layer: DecoderLayer

    def attend(self, hidden: Tensor, embedded: Tensor, mask: Tensor | None = None) -> Tensor:
        """Join the hidden state and the embedding, and run attention."""

    def moved(self, values: Tensor) -> Tensor:
        """Shift values, (batch, sequence), by ``number + 1`` positions; fill the end with zeros."""


# A whole model is a chunk with ``pre_process`` and ``post_process``.
class ChunkModel(Protocol):
    """A model, or a chunk of its layers.

    Attributes:
        pre_process: The chunk has the embedding.
        post_process: The chunk has the output layer.
        share_embeddings_and_output_weights: Embedding and output layer use one parameter.
        expert_group: See ``MoeLayer``.
        vp_stage: The chunk's number on its rank, for the hooks of a schedule.
    """

    pre_process: bool
    post_process: bool
    # If true, steps at both ends of the chunk add to one gradient, and must not overlap.
    share_embeddings_and_output_weights: bool
    expert_group: dist.ProcessGroup | None
    # Passed on to the hooks only; the schedule itself does not use it.
    vp_stage: int | None

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        """The layers, in order, without those for multi-token prediction."""

    @property
    def predictors(self) -> Sequence[PredictionLayer]:
        """The layers for multi-token prediction, in order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters; the schedule runs on the device of the first one."""

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the hidden states of ids."""

    def output(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        further: Iterable[Tensor] = (),
    ) -> Tensor:
        """Return the logits; with labels, each token's loss plus the ``further`` losses."""

    def further_losses(
        self,
        mtp: PredictionLayer,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the losses that a layer for multi-token prediction adds at each position."""
