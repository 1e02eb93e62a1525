"""Multi-token prediction: a further layer that predicts the token after the next.

Layer k (from 0) sees the hidden state of the layer before it, and the embedding of the token that
is k + 1 further on (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 2.2).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swpipe.tasks.transformer.decoder_layer import TransformerLayer
from swpipe.tasks.transformer.transformer_config import TransformerConfig
from swpipe.tasks.transformer.weight_gradients import Linear


class MultiTokenPredictionLayer(nn.Module):
    """Norms and a projection before a transformer layer, a norm after it.

    Args:
        config: The model's.
        number: From 0.
        group: The ranks that share the experts; None for this process alone.
    """

    def __init__(
        self, config: TransformerConfig, number: int, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.number = number
        self.enorm = nn.LayerNorm(config.hidden_size)
        self.hnorm = nn.LayerNorm(config.hidden_size)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.transformer_layer = TransformerLayer(config, config.mtp_layer_type, group)
        self.final_norm = nn.LayerNorm(config.hidden_size)

    def attend(self, hidden: Tensor, embedded: Tensor, mask: Tensor | None) -> Tensor:
        """Join hidden state and embedding, (batch, sequence, hidden) each, and attend."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        return self.transformer_layer.attend(self.eh_proj(joined), mask)

    def moved(self, values: Tensor) -> Tensor:
        """Of (batch, sequence), what is ``number + 1`` further on; zeros at the end."""
        steps = self.number + 1
        return functional.pad(values[:, steps:], (0, min(steps, values.shape[1])))

    def forward(self, hidden: Tensor, embedded: Tensor, mask: Tensor | None = None) -> Tensor:
        """The next layer's hidden state, (batch, sequence, hidden)."""
        return self.transformer_layer.feed_forward(self.attend(hidden, embedded, mask))
