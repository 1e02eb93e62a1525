"""A decoder layer: attention and a feed-forward network, each with a norm before it.

The steps of a layer are methods, which ``forward`` calls one after the other; a schedule calls them
at other times. The feed-forward network is one MLP or a mixture of experts.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from swpipe.core.messages import shown
from swpipe.tasks.transformer.attention import SelfAttention
from swpipe.tasks.transformer.experts import MixtureOfExperts, Mlp, Routing
from swpipe.tasks.transformer.token_exchange import exchange
from swpipe.tasks.transformer.transformer_config import LAYER_TYPES, TransformerConfig


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
        if isinstance(self.mlp, Mlp):
            fed: Tensor = self.mlp(self.mlp_norm(hidden))
            return hidden + fed
        normed = self.mlp_norm(hidden)
        rows, weights, routing = self.mlp.route(normed)
        rows = exchange(rows, routing.receive, routing.send, routing.group)
        rows, shared = self.through_experts(rows, normed, routing)
        rows = exchange(rows, routing.send, routing.receive, routing.group)
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
