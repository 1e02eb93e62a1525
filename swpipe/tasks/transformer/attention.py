"""Causal self-attention of several heads."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from swpipe.tasks.transformer.transformer_config import TransformerConfig
from swpipe.tasks.transformer.weight_gradients import Linear


class SelfAttention(nn.Module):
    """Scaled dot-product attention (Vaswani et al., 2017)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            hidden: (batch, sequence, hidden).
            mask: Boolean, True where a query attends to a key; it broadcasts to (batch, heads,
                queries, keys). None for causal attention.

        Returns:
            (batch, sequence, hidden).
        """
        batch, length, size = hidden.shape
        # (batch, sequence, 3 x hidden) to three of (batch, heads, sequence, hidden / heads)
        split = self.qkv(hidden).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        out: Tensor = self.proj(attended.transpose(1, 2).reshape(batch, length, size))
        return out
