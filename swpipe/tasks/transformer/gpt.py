"""A small GPT, whole or in chunks of consecutive layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swpipe.core.messages import shown
from swpipe.tasks.transformer.chunk_schedule import TransformerModelChunkSchedulePlan
from swpipe.tasks.transformer.gpt_layers import MultiTokenPredictionLayer, TransformerLayer
from swpipe.tasks.transformer.transformer_config import TransformerConfig

STD = 0.02
"""Standard deviation of initial weights (Radford et al., 2019)."""


class GPTModel(nn.Module):
    """Some consecutive layers of a GPT, with its beginning and its end where asked for.

    Names of parameters are those of the whole model, and so are their initial values: chunks that
    are made on different ranks are the parts of one model, bit for bit.

    Args:
        config: The whole model's.
        layers: Global indices of this chunk's layers, from 0, consecutive; None for all.
        pre_process: With the embedding.
        post_process: With the last norm and the output layer, and layers for multi-token
            prediction where ``config`` has some.
        expert_group: The ranks that share the experts; None for this process alone.
        vp_stage: The chunk's number among those of its rank, for the hooks of a schedule.
        device: Where the parameters are.

    Raises:
        ValueError: The layers are not some consecutive layers of the model, the ranks do not divide
            the experts, or the output needs an embedding that is not in the chunk.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: Iterable[int] | None = None,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        expert_group: dist.ProcessGroup | None = None,
        vp_stage: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.expert_group, self.vp_stage = expert_group, vp_stage
        self.layer_numbers = _checked(layers, config.num_layers)
        if post_process and not pre_process and (config.tie_embeddings or config.mtp_num_layers):
            raise ValueError(
                "tie_embeddings and mtp_num_layers use the embedding where the output layer is: "
                "this chunk has post_process without pre_process; give it both, or neither option"
            )
        with torch.device("meta"):  # where the layers' own initial values cost nothing
            if pre_process:
                self.embedding = Embedding(config)
            self.layers = nn.ModuleDict(
                {
                    str(number): TransformerLayer(config, config.types[number], expert_group)
                    for number in self.layer_numbers
                }
            )
            self.mtp = nn.ModuleList(
                MultiTokenPredictionLayer(config, number, expert_group)
                for number in range(config.mtp_num_layers if post_process else 0)
            )
            if post_process:
                self.final_norm = nn.LayerNorm(config.hidden_size)
                if not config.tie_embeddings:
                    self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device=device or torch.get_default_device())
        self._init_parameters()

    def forward(
        self,
        inputs: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute this chunk.

        Args:
            inputs: With ``pre_process`` the ids of tokens, (batch, sequence); else what the chunk
                before returned, (batch, sequence, hidden).
            position_ids: Positions of tokens, from 0, (batch, sequence) or (sequence,); None for
                0, 1, 2, and so on. Used with ``pre_process``.
            attention_mask: As of ``SelfAttention``; None for causal attention.
            labels: The token to predict at each position, (batch, sequence). Used with
                ``post_process``.
            loss_mask: What to multiply each token's loss by, (batch, sequence); None for 1.

        Returns:
            With ``post_process`` the logits, (batch, sequence, vocabulary), or the loss of each
            token, (batch, sequence), where there are labels; else (batch, sequence, hidden). The
            losses of multi-token prediction are added to it, position by position.
        """
        hidden = self.embed(inputs, position_ids) if self.pre_process else inputs
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask)
        if not self.post_process:
            return hidden
        further, last = [], hidden
        if labels is not None:
            for mtp in self.predictors:
                embedded = self.embed(mtp.moved(inputs), position_ids)
                last = mtp(last, embedded, attention_mask)
                further.append(self.further_losses(mtp, last, labels, loss_mask))
        return self.output(hidden, labels, loss_mask, further)

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) of ids (batch, sequence)."""
        out: Tensor = self.embedding(input_ids, position_ids)
        return out

    def build_schedule_plan(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Mapping[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        loss_mask: Tensor | None = None,
    ) -> TransformerModelChunkSchedulePlan:
        """The nodes of this chunk for one microbatch; arguments as of the plan's class."""
        return TransformerModelChunkSchedulePlan(
            self, input_ids, position_ids, attention_mask, decoder_input, labels, packed_seq_params,
            extra_block_kwargs, runtime_gather_output, loss_mask,
        )  # fmt: skip

    def _init_parameters(self) -> None:
        """Biases 0, weights of norms 1, others normal by the seed and their global names alone."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif "norm" in name:
                    parameter.fill_(1.0)
                else:
                    digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                    drawn = torch.empty(parameter.shape).normal_(0.0, STD, generator=generator)
                    parameter.copy_(drawn)

    @property
    def decoder_layers(self) -> list[TransformerLayer]:
        """This chunk's layers, in order, without those for multi-token prediction."""
        return [one for one in self.layers.values() if isinstance(one, TransformerLayer)]

    @property
    def predictors(self) -> list[MultiTokenPredictionLayer]:
        """The layers for multi-token prediction, in order."""
        return [one for one in self.mtp if isinstance(one, MultiTokenPredictionLayer)]

    def further_losses(
        self,
        mtp: MultiTokenPredictionLayer,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """What a layer for multi-token prediction adds to the loss of each position.

        The last positions, of which the token to predict is not known, add nothing.
        """
        mask = torch.ones_like(labels, dtype=hidden.dtype) if loss_mask is None else loss_mask
        losses = token_losses(self._logits(mtp.final_norm(hidden)), mtp.moved(labels))
        weight = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        return losses * mtp.moved(mask) * weight

    def output(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        further: Iterable[Tensor] = (),
    ) -> Tensor:
        """Logits, or losses and what is added to them, as ``forward`` returns them."""
        logits = self._logits(self.final_norm(hidden))
        if labels is None:
            return logits
        losses = token_losses(logits, labels)
        if loss_mask is not None:
            losses = losses * loss_mask
        for more in further:
            losses = losses + more
        return losses

    def _logits(self, hidden: Tensor) -> Tensor:
        tied = self.config.tie_embeddings
        return functional.linear(
            hidden, self.embedding.word.weight if tied else self.output_layer.weight
        )


class Embedding(nn.Module):
    """A token's features, plus those of its position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_sequence_length, config.hidden_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) of ids (batch, sequence); None for positions 0, 1, 2, ..."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        out: Tensor = self.word(input_ids) + self.position(position_ids)
        return out


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token, (batch, sequence), from logits (batch, sequence, vocabulary)."""
    flat = functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
    )
    return flat.view(labels.shape)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of ``token_losses``, a scalar: the loss function of a pipeline's last stage."""
    return token_losses(logits, labels).mean()


def _checked(layers: Iterable[int] | None, count: int) -> tuple[int, ...]:
    numbers = tuple(range(count) if layers is None else layers)
    first = numbers[0] if numbers else 0
    if first < 0 or numbers != tuple(range(count))[first : first + len(numbers)]:
        raise ValueError(
            f"layers is {shown(list(numbers))}: give consecutive numbers from 0 to {count - 1}, "
            f"since the model has num_layers={count}"
        )
    return numbers
