"""Mixtures of experts compute what they should, wherever the experts are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.transformer import TransformerLayer
from tests.support.ranks import Ranks
from tests.tasks.transformer.models import model

SHARED = {"moe_shared_expert_size": 24}


def _hidden(rank: int) -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(rank))


def _one_by_one(layer: TransformerLayer, hidden: Tensor) -> Tensor:
    """Each token through each of its experts, alone."""
    moe = layer.mixture
    normed = layer.mlp_norm(hidden)
    weights, chosen = torch.softmax(moe.router(normed), dim=-1).topk(2, dim=-1)
    out = hidden + moe.shared_expert(normed)
    for row in range(2):
        for place in range(8):
            for weight, expert in zip(weights[row, place], chosen[row, place], strict=True):
                out[row, place] += weight * moe.experts[str(int(expert))](normed[row, place])
    return out


@torch.no_grad()
def test_each_token_is_the_weighted_sum_of_its_experts() -> None:
    """With the shared expert and the residual."""
    (layer,) = model("moe", **SHARED).decoder_layers
    torch.testing.assert_close(layer.feed_forward(_hidden(0)), _one_by_one(layer, _hidden(0)))


@torch.no_grad()
def _on_its_rank() -> Tensor:
    (layer,) = model("moe", group=dist.group.WORLD, **SHARED).decoder_layers
    assert len(layer.mixture.experts) == 2
    return layer.feed_forward(_hidden(dist.get_rank()))


@torch.no_grad()
def test_two_ranks_compute_what_one_does(two_ranks: Ranks) -> None:
    """Each has half of the experts, with the parameters of the whole model's."""
    (layer,) = model("moe", **SHARED).decoder_layers
    for rank, found in enumerate(two_ranks.run(_on_its_rank)):
        torch.testing.assert_close(found, layer.feed_forward(_hidden(rank)))
