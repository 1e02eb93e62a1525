"""The layers of a small GPT: attention and a feed-forward network, each with a norm before it.

The steps of a layer are methods, which ``forward`` calls one after the other; a schedule calls them
at other times. The feed-forward network is one MLP or a mixture of experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swpipe.core.messages import shown
from swpipe.tasks.transformer.experts import MixtureOfExperts, Mlp, Routing
from swpipe.tasks.transformer.transformer_config import LAYER_TYPES, TransformerConfig
from swpipe.tasks.transformer.weight_gradients import Linear


class SelfAttention(nn.Module):
    """Scaled dot-product attention of several heads (Vaswani et al., 2017)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            hidden: (batch, sequence, hidden).
            mask: Boolean, True where a key is hidden from a query, as Megatron's; it broadcasts to
                (batch, heads, queries, keys). None for causal attention.

        Returns:
            (batch, sequence, hidden).

        Raises:
            ValueError: The mask is not boolean.
        """
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(
                f"the attention mask is of {mask.dtype}: give a boolean one, True where a key is "
                "hidden from a query"
            )
        batch, length, size = hidden.shape
        # (batch, sequence, 3 x hidden) to three of (batch, heads, sequence, hidden / heads)
        split = self.qkv(hidden).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None if mask is None else ~mask, is_causal=mask is None
        )
        out: Tensor = self.proj(attended.transpose(1, 2).reshape(batch, length, size))
        return out


class TransformerLayer(nn.Module):
    """One layer with pre-normalisation and residual connections.

    Args:
        config: The model's.
        layer_type: "dense" or "moe".
        group: The ranks that share the experts; None for this process alone.

    Raises:
        ValueError: ``layer_type`` is unknown, or the ranks do not divide the experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_type: str = "dense",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if layer_type not in LAYER_TYPES:
            raise ValueError(
                f"layer_type is {shown(layer_type)}: give one of {', '.join(LAYER_TYPES)}"
            )
        self.config, self.layer_type, self.group = config, layer_type, group
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp: Mlp | MixtureOfExperts = (
            MixtureOfExperts(config, group)
            if layer_type == "moe"
            else Mlp(config.hidden_size, config.ffn_size)
        )

    def attend(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The first half: norm, attention, residual."""
        attended: Tensor = self.self_attention(self.input_norm(hidden), mask)
        return hidden + attended

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half: norm, feed-forward network, residual."""
        normed = self.mlp_norm(hidden)
        if isinstance(self.mlp, Mlp):
            fed: Tensor = self.mlp(normed)
            return hidden + fed
        rows, weights, routing = self.mlp.route(normed)
        rows = routing.exchange(rows, to_experts=True)
        rows, shared = self.through_experts(rows, normed, routing)
        rows = routing.exchange(rows, to_experts=False)
        return self.merge(rows, weights, shared, hidden, routing)

    def through_experts(
        self, rows: Tensor, normed: Tensor, routing: Routing
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's experts, and what the shared expert makes of all tokens."""
        moe = self.mixture
        shared = None if moe.shared_expert is None else moe.shared_expert(normed)
        return moe.compute(rows, routing), shared

    def merge(
        self,
        rows: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        hidden: Tensor,
        routing: Routing,
    ) -> Tensor:
        """What came back of the experts, the shared expert's, and the residual."""
        merged = self.mixture.merge(rows, weights, routing).view(hidden.shape)
        return hidden + (merged if shared is None else merged + shared)

    @property
    def mixture(self) -> MixtureOfExperts:
        """The experts.

        Raises:
            RuntimeError: The layer is dense.
        """
        if not isinstance(self.mlp, MixtureOfExperts):
            raise RuntimeError("this layer is dense: it has no experts")
        return self.mlp

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Both halves, of (batch, sequence, hidden); ``mask`` as of ``SelfAttention``."""
        return self.feed_forward(self.attend(hidden, mask))


class MultiTokenPredictionLayer(nn.Module):
    """A further layer that predicts the token after the next.

    Layer k (from 0) sees the hidden state of the layer before it, and the embedding of the token
    that is k + 1 further on (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 2.2).

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
