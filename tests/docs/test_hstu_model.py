"""The HSTU model of the examples: its layer beside a dense reference, and its batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.tasks.torchrec.hstu.ranking import hstu_model
from tests.tasks.torchrec.hstu.training import BATCH, batches

WIDTH, HEADS, LONGEST = 6, 2, 5


def _layer(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layer = hstu_model.HSTULayer(WIDTH, HEADS, LONGEST).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def _tokens(lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens, and their times in order within each sequence."""
    draws = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    tokens = torch.randn(count, WIDTH, generator=draws, dtype=torch.float64)
    steps = [torch.randint(0, 10**6, (length,), generator=draws).cumsum(0) for length in lengths]
    return tokens, torch.cat([torch.empty(0, dtype=torch.int64), *steps])


def _by_layer(layer: Any, tokens: Tensor, times: Tensor, lengths: list[int]) -> Tensor:
    places = hstu_model.Places.of(torch.tensor(lengths, dtype=torch.int64), len(tokens), LONGEST)
    out: Tensor = layer(tokens, times, places)
    return out


def _dense(layer: Any, x: Tensor, times: Tensor) -> Tensor:
    """One sequence by the formulas of the paper, one pair of tokens at a time."""
    n = len(x)
    u, v, q, k = nn.functional.silu(layer.project(layer.norm(x))).chunk(4, dim=1)
    size = WIDTH // HEADS
    heads = []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        rows = []
        for i in range(n):
            row = torch.zeros(size, dtype=x.dtype)
            for j in range(i + 1):
                seconds = max(1, abs(int(times[i]) - int(times[j])))
                bucket = min(int(math.log(seconds) / 0.301), 63)
                rab = layer.bias.of_distance[i - j, 0] + layer.bias.of_time[bucket, 0]
                weight = nn.functional.silu(q[i, part] @ k[j, part] + rab)
                row = row + weight * v[j, part] / LONGEST
            rows.append(row)
        heads.append(torch.stack(rows))
    return x + layer.output(layer.attended(torch.cat(heads, dim=1)) * u)


def _gradients(out: Tensor, layer: Any, tokens: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    inputs = [tokens, *layer.parameters()]
    found = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]


@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=4))
def test_the_layer_is_the_dense_reference_for_each_sequence(lengths: list[int]) -> None:
    """Forward and all gradients, for sequences of any lengths, empty ones too."""
    layer = _layer()
    tokens, times = _tokens(lengths)
    tokens.requires_grad_()
    out = _by_layer(layer, tokens, times, lengths)
    parts = zip(tokens.split(lengths), times.split(lengths), strict=True)
    wanted = torch.cat([_dense(layer, x, t) if len(x) else x for x, t in parts])
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    found, right = (_gradients(each, layer, tokens) for each in (out, wanted))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_a_token_sees_nothing_later_and_no_other_sequence() -> None:
    """Changes to a token change it and those after it in its sequence, and nothing else."""
    layer, lengths = _layer(), [4, 3]
    tokens, times = _tokens(lengths)
    before = _by_layer(layer, tokens, times, lengths)
    tokens[2, 0] += 1
    after = _by_layer(layer, tokens, times, lengths)
    changed = (before != after).any(1).tolist()
    assert changed == [False, False, True, True, False, False, False]


def test_a_batch_lies_row_by_row() -> None:
    """Histories become features of items and actions, times and a number of losses."""
    (batch,) = batches(1)
    assert batch.ids.stride() == BATCH
    assert batch.ids.keys() == ["item", "action"]
    assert float(batch.num_loss_tokens()) == len(batch.times.values())
    lengths = batch.times.lengths()
    assert torch.equal(batch.work(), lengths.float() ** 2)
    assert hstu_model.SequenceBatch.of([(), ()]).ids.lengths().tolist() == [0] * 4
