"""The small GPT: its parts are those of the whole, and wrong sizes are refused in words."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from swpipe.tasks.transformer import GPTModel, TransformerConfig, mean_loss, token_losses

CONFIG = TransformerConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8
)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of two sequences of eight tokens."""
    drawn = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def chunks(*bounds: int) -> list[GPTModel]:
    """The whole model in pieces."""
    return [
        GPTModel(CONFIG, range(a, b), pre_process=a == 0, post_process=b == CONFIG.num_layers)
        for a, b in pairwise(bounds)
    ]


def test_chunks_are_the_parts_of_the_whole_bit_for_bit() -> None:
    """Names, initial values, the loss and all gradients, whatever was drawn before."""
    whole = GPTModel(CONFIG)
    torch.rand(3)
    parts = chunks(0, 1, 3, 4)
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


def test_making_a_model_draws_nothing() -> None:
    """The generators of the process stand where they stood."""
    before = torch.get_rng_state()
    GPTModel(CONFIG)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_two_layers_begin_alike() -> None:
    """Each layer has initial weights of its own."""
    weights = [p for name, p in GPTModel(CONFIG).named_parameters() if name.endswith("fc1.weight")]
    assert len({tuple(weight[0].tolist()) for weight in weights}) == CONFIG.num_layers


def test_labels_give_the_loss_of_each_token() -> None:
    """(batch, sequence); their mean is what ``mean_loss`` of the logits is."""
    model, (ids, labels) = GPTModel(CONFIG), tokens()
    losses = model(ids, labels=labels)
    assert losses.shape == ids.shape
    assert torch.equal(losses, token_losses(model(ids), labels))
    assert torch.equal(losses.mean(), mean_loss(model(ids), labels))


def test_attention_is_causal_by_default_and_as_the_mask_says() -> None:
    """A later token changes nothing before it; the same by a mask; with a full one it does."""
    model, (ids, _) = GPTModel(CONFIG), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 32
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    for mask in (None, causal):
        before, after = (model(x, attention_mask=mask)[:, :-1] for x in (ids, other))
        assert torch.equal(before, after)
    full = torch.ones_like(causal)
    assert not torch.equal(*(model(x, attention_mask=full)[:, :-1] for x in (ids, other)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0: give a whole number, 1 or more"),
        ({"hidden_size": 15}, "hidden_size is 15: num_attention_heads, 2, must divide it"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, object], message: str) -> None:
    """The message has the name, the value and the rule."""
    sizes = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**sizes, **wrong})


@pytest.mark.parametrize("layers", [[0, 2], [3, 4], [-1, 0], [1, 0]])
def test_layers_that_the_model_has_not_are_refused(layers: list[int]) -> None:
    """Only consecutive layers of the whole model make a chunk."""
    with pytest.raises(ValueError, match="consecutive numbers from 0 to 3"):
        GPTModel(CONFIG, layers)
