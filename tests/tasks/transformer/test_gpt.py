"""The GPT of the examples, which all tests of schedules use: parts, experts, mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from docs.examples.moe_gpt import (
    GPTModel,
    MixtureOfExperts,
    MoeTransformerLayer,
    TransformerConfig,
    mean_loss,
    token_losses,
)
from tests.support.ranks import Ranks
from tests.tasks.transformer.models import config, model

CONFIG = TransformerConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8
)
SHARED = {"moe_shared_expert_size": 24}


def tokens() -> tuple[Tensor, Tensor]:
    """Return ids and labels of two sequences of eight tokens."""
    drawn = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def test_chunks_are_the_parts_of_the_whole_bit_for_bit() -> None:
    """Names, initial values, the loss and all gradients are equal; making a model draws nothing."""
    before = torch.get_rng_state()
    whole = GPTModel(CONFIG)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    parts = [
        GPTModel(CONFIG, range(a, b), pre_process=a == 0, post_process=b == CONFIG.num_layers)
        for a, b in pairwise((0, 1, 3, 4))
    ]
    ids, labels = tokens()
    hidden = ids
    for part in parts:
        hidden = part(hidden)
    losses = mean_loss(hidden, labels), mean_loss(whole(ids), labels)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    theirs = {name: p for part in parts for name, p in part.named_parameters()}
    ours = dict(whole.named_parameters())
    assert theirs.keys() == ours.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
        assert torch.equal(parameter.grad, theirs[name].grad)
    weights = [weight for name, weight in ours.items() if name.endswith("fc1.weight")]
    assert len({tuple(weight[0].tolist()) for weight in weights}) == CONFIG.num_layers


def test_labels_give_the_loss_of_each_token() -> None:
    """They are (batch, sequence); their mean equals ``mean_loss`` of the logits."""
    of, (ids, labels) = GPTModel(CONFIG), tokens()
    losses = of(ids, labels=labels)
    assert losses.shape == ids.shape
    assert torch.equal(losses, token_losses(of(ids), labels))
    assert torch.equal(losses.mean(), mean_loss(of(ids), labels))


def test_attention_is_causal_by_default_and_as_the_mask_says() -> None:
    """Neither without a mask nor with Megatron's does a later token change an earlier one."""
    of, (ids, _) = GPTModel(CONFIG), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 32
    causal = torch.tril(torch.ones(1, 1, 8, 8)) < 0.5  # as Megatron's data loaders make it
    for mask in (None, causal):
        before, after = (of(x, attention_mask=mask)[:, :-1] for x in (ids, other))
        assert torch.equal(before, after)
    full = torch.zeros_like(causal)
    assert not torch.equal(*(of(x, attention_mask=full)[:, :-1] for x in (ids, other)))


# ------------------------------------------------------------------------------------- experts


def _hidden(rank: int) -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(rank))


def _one_by_one(layer: MoeTransformerLayer, hidden: Tensor) -> Tensor:
    """Return the experts' results for each token alone."""
    moe = layer.mlp
    normed = layer.mlp_norm(hidden)
    weights, chosen = torch.softmax(moe.router(normed), dim=-1).topk(2, dim=-1)
    out = hidden + moe.shared_expert(normed)
    for row in range(2):
        for place in range(8):
            for weight, expert in zip(weights[row, place], chosen[row, place], strict=True):
                out[row, place] += weight * moe.experts[str(int(expert))](normed[row, place])
    return out


@torch.no_grad()
def _on_its_rank() -> Tensor:
    with pytest.raises(ValueError, match="3 experts cannot be shared by 2 ranks"):
        MixtureOfExperts(config("moe", num_experts=3), dist.group.WORLD)
    (layer,) = model("moe", group=dist.group.WORLD, **SHARED).decoder_layers
    assert len(layer.mlp.experts) == 2
    return layer.feed_forward(_hidden(dist.get_rank()))


@torch.no_grad()
def test_each_token_is_the_weighted_sum_of_its_experts(two_ranks: Ranks) -> None:
    """This includes the shared expert and the residual; two ranks have half of them each."""
    (layer,) = model("moe", **SHARED).decoder_layers
    for rank, found in enumerate(two_ranks.run(_on_its_rank)):
        torch.testing.assert_close(found, _one_by_one(layer, _hidden(rank)))
        torch.testing.assert_close(layer.feed_forward(_hidden(rank)), found)
