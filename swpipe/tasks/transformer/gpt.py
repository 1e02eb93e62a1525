"""A small GPT, whole or in chunks of consecutive layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from swpipe.core.messages import shown
from swpipe.tasks.transformer.decoder_layer import TransformerLayer
from swpipe.tasks.transformer.parameters import init_parameters
from swpipe.tasks.transformer.transformer_config import TransformerConfig


class GPTModel(nn.Module):
    """Some consecutive layers of a GPT, with its beginning and its end where asked for.

    Names of parameters are those of the whole model, and so are their initial values: chunks that
    are made on different ranks are the parts of one model, bit for bit.

    Args:
        config: The whole model's.
        layers: Global indices of this chunk's layers, from 0, consecutive; None for all.
        pre_process: With the embedding.
        post_process: With the last norm and the output layer.
        device: Where the parameters are.

    Raises:
        ValueError: The layers are not some consecutive layers of the model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: Iterable[int] | None = None,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.layer_numbers = _checked(layers, config.num_layers)
        with torch.device("meta"):  # where the layers' own initial values cost nothing
            if pre_process:
                self.embedding = Embedding(config)
            self.layers = nn.ModuleDict(
                {str(number): TransformerLayer(config) for number in self.layer_numbers}
            )
            if post_process:
                self.final_norm = nn.LayerNorm(config.hidden_size)
                self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device=device or torch.get_default_device())
        init_parameters(self, config.seed)

    def forward(
        self,
        inputs: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
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

        Returns:
            With ``post_process`` the logits, (batch, sequence, vocabulary), or the loss of each
            token, (batch, sequence), where there are labels; else (batch, sequence, hidden).
        """
        hidden = self.embedding(inputs, position_ids) if self.pre_process else inputs
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask)
        if not self.post_process:
            return hidden
        logits: Tensor = self.output_layer(self.final_norm(hidden))
        return logits if labels is None else token_losses(logits, labels)


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
