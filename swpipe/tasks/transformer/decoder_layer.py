"""A decoder layer: attention and a feed-forward network, each with a norm before it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swpipe.tasks.transformer.attention import SelfAttention
from swpipe.tasks.transformer.transformer_config import TransformerConfig


class Mlp(nn.Module):
    """Two linear maps with a GELU between."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inner)
        self.fc2 = nn.Linear(inner, size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of (..., size), the same shape."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(hidden)))
        return out


class TransformerLayer(nn.Module):
    """One layer with pre-normalisation and residual connections."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = Mlp(config.hidden_size, config.ffn_size)

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The first half: norm, attention, residual."""
        attended: Tensor = self.self_attention(self.input_norm(hidden), mask)
        return hidden + attended

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half: norm, feed-forward network, residual."""
        fed: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + fed

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Both halves, of (batch, sequence, hidden); ``mask`` as of ``SelfAttention``."""
        return self.feed_forward(self.attend(hidden, mask))
