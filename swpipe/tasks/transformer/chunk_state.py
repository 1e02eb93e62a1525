"""What the nodes of one microbatch share within a chunk of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.transformer.decoder_layer import TransformerLayer
from swpipe.tasks.transformer.mtp_layer import MultiTokenPredictionLayer


class ChunkModel(Protocol):
    """What schedules ask of a chunk.

    Attributes:
        decoder_layers: The layers, in order, without those for multi-token prediction.
        predictors: The layers for multi-token prediction, in order.
        pre_process: Whether the chunk embeds tokens.
        post_process: Whether it computes the output.
        expert_group: The ranks that share the experts; None for this process alone.
        vp_stage: The chunk's number among those of its rank.
    """

    pre_process: bool
    post_process: bool
    expert_group: dist.ProcessGroup | None
    vp_stage: int | None

    @property
    def decoder_layers(self) -> list[TransformerLayer]:
        """As above."""

    @property
    def predictors(self) -> list[MultiTokenPredictionLayer]:
        """As above."""

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) of ids (batch, sequence)."""

    def output(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        further: Iterable[Tensor] = (),
    ) -> Tensor:
        """What the chunk's forward returns."""

    def further_losses(
        self,
        mtp: MultiTokenPredictionLayer,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """What a layer for multi-token prediction adds to the losses."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelChunkState:
    """The inputs of one microbatch, and what its layers pass on besides hidden states.

    Attributes:
        model: The chunk.
        input_ids: Tokens, (batch, sequence); None for a chunk without them.
        position_ids: Their positions.
        attention_mask: Where tokens attend to; None for causal attention.
        decoder_input: The first layer's input, (batch, sequence, hidden), instead of an embedding.
        labels: Tokens to predict, (batch, sequence); None for logits.
        loss_mask: What to multiply losses by, (batch, sequence); None for 1.
        packed_seq_params: Where the sequences in a row end.
        extra_block_kwargs: Further arguments of layers.
        runtime_gather_output: As given; the output layer is whole, so there is nothing to gather.
        main_hidden: The last layer's output, while layers for multi-token prediction go on.
        further_losses: What each of these has added so far.
    """

    model: ChunkModel
    input_ids: Any = None
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    decoder_input: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    packed_seq_params: Any = None
    extra_block_kwargs: Mapping[str, Any] | None = None
    runtime_gather_output: bool | None = None
    main_hidden: Tensor | None = None
    further_losses: list[Tensor] = field(default_factory=list)
