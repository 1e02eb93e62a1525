"""What a model offers so that schedules can run its layers: protocols, without a model.

A schedule calls the methods that the model's own forward calls, at other times. A layer needs
``attend`` and ``feed_forward``; one whose experts are on several ranks has the three parts of its
``feed_forward`` besides, and a chunk of a model what is around its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn


class Exchange(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """The rows, when they are here."""


class Routing(Protocol):
    """Where the rows of a microbatch go, without any tensor that has a gradient."""

    @property
    def tensors(self) -> Iterable[Tensor]:
        """What ``merge`` reads of it."""

    def start(self, rows: Tensor, *, to_experts: bool) -> Exchange:
        """Send rows to the experts, or back from them; later work overlaps until ``wait``."""


class Routed(NamedTuple):
    """What ``route`` returns.

    Attributes:
        rows: To be sent, (rows, hidden).
        weights: Of the experts, for ``merge``.
        normed: What the shared expert computes from; None where there is none.
        routing: Where the rows go.
    """

    rows: Tensor
    weights: Tensor
    normed: Tensor | None
    routing: Routing


class DecoderLayer(Protocol):
    """A layer. It may have an attribute ``config`` with two options.

    ``delay_wgrad_compute`` delays the weight gradients of ``swpipe.tasks.transformer.Linear`` maps;
    ``ep_overlap_early_attn_memory_release`` lets attention's backward come early (``LayerKind``).
    """

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The first half, with its residual. Hidden states have whatever layout layers take."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half, with its residual."""


class MoeLayer(DecoderLayer, Protocol):
    """A layer whose second half sends tokens to experts on other ranks.

    Attributes:
        expert_group: The ranks that share the experts; None for this process alone.
    """

    expert_group: dist.ProcessGroup | None

    def route(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Routed:
        """Choose experts and sort rows by them; may start an exchange of counts.

        ``padding_mask`` is True where a token is none, (batch, sequence).
        """

    def through_experts(
        self, rows: Tensor, normed: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's experts, and what the shared expert makes of all tokens."""

    def merge(
        self,
        rows: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        hidden: Tensor,
        routing: Routing,
    ) -> Tensor:
        """The hidden state, of the rows that came back, the shared expert's and the residual."""


class PredictionLayer(Protocol):
    """A layer for multi-token prediction.

    Attributes:
        number: From 0.
        transformer_layer: The layer within.
    """

    number: int
    transformer_layer: DecoderLayer

    def attend(self, hidden: Tensor, embedded: Tensor, mask: Tensor | None = None) -> Tensor:
        """Join hidden state and embedding, and attend."""

    def moved(self, values: Tensor) -> Tensor:
        """Of (batch, sequence), what is ``number + 1`` further on; zeros at the end."""


class ChunkModel(Protocol):
    """A model, or a chunk of its layers.

    Attributes:
        pre_process: It has the embedding.
        post_process: It has the output layer.
        share_embeddings_and_output_weights: These two use one parameter.
        expert_group: As of its layers.
        vp_stage: The chunk's number among those of its rank, for the hooks of a schedule.
    """

    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    expert_group: dist.ProcessGroup | None
    vp_stage: int | None

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        """The layers, in order, without those for multi-token prediction."""

    @property
    def predictors(self) -> Sequence[PredictionLayer]:
        """The layers for multi-token prediction, in order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of ``nn.Module``: where they are is where the schedule runs."""

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Hidden states of ids."""

    def output(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        further: Iterable[Tensor] = (),
    ) -> Tensor:
        """Logits; with labels the loss of each token, to which ``further`` are added."""

    def further_losses(
        self,
        mtp: PredictionLayer,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """What a layer for multi-token prediction adds to the loss of each position."""
