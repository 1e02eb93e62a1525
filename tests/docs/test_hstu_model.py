"""The HSTU model of the examples: its layer equals a dense reference; its batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
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
    """Return tokens and times; the times are in order within each sequence."""
    draws = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    tokens = torch.randn(count, WIDTH, generator=draws, dtype=torch.float64)
    steps = [torch.randint(0, 10**6, (length,), generator=draws).cumsum(0) for length in lengths]
    return tokens, torch.cat([torch.empty(0, dtype=torch.int64), *steps])


def _dense(layer: Any, x: Tensor, times: Tensor) -> Tensor:
    """Return the layer's output for one sequence, by the paper's formulas for pairs of tokens."""
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


def test_the_layer_is_the_dense_reference_for_each_sequence() -> None:
    """Sequences have any lengths, also 0; none sees another one, nor later tokens."""
    layer = _layer()
    for lengths in ([LONGEST], [0, 3, 1], [2, 0, LONGEST, 0]):
        tokens, times = _tokens(lengths)
        places = hstu_model.Places.of(torch.tensor(lengths), len(tokens), LONGEST)
        parts = zip(tokens.split(lengths), times.split(lengths), strict=True)
        wanted = torch.cat([_dense(layer, x, t) if len(x) else x for x, t in parts])
        torch.testing.assert_close(layer(tokens, times, places), wanted, rtol=1e-12, atol=1e-12)


def test_a_batch_lies_row_by_row() -> None:
    """Histories become features of items and actions, times and a number of losses."""
    (batch,) = batches(1)
    assert batch.ids.stride() == BATCH
    assert batch.ids.keys() == ["item", "action"]
    assert float(batch.num_loss_tokens()) == len(batch.times.values())
    lengths = batch.times.lengths()
    assert torch.equal(batch.work(), lengths.float() ** 2)
    assert hstu_model.SequenceBatch.of([(), ()]).ids.lengths().tolist() == [0] * 4
