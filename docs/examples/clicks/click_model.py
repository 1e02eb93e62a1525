"""A click model in the style of DLRM, and its batches as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import torch
from click_log import IDS, INTEGERS, LABEL
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 64


@dataclass(frozen=True)
class ClickBatch:
    """One batch of B rows.

    Attributes:
        labels: [B] float32, 0 or 1.
        integers: [B, 13] float32 on a log scale, 0 where missing.
        ids: [B, 26] int64, rows of the table; the first row of a column is for missing ids.
    """

    labels: Tensor
    integers: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> ClickBatch:
        """Return the batch on a device."""
        parts = (self.labels, self.integers, self.ids)
        return ClickBatch(*(part.to(device, non_blocking=True) for part in parts))


def encode(frame: pl.DataFrame, buckets: int) -> ClickBatch:
    """Return decoded rows as tensors, with ids hashed into ``buckets`` rows for each column."""
    integers = pl.col(INTEGERS)
    scaled = frame.select((integers.abs().log1p() * integers.sign()).fill_null(0.0))
    # Multiplicative hashing (Knuth, TAOCP 3, 6.4): an id has 32 bits, the product at most 64.
    hashed = frame.select((pl.col(IDS) * 2654435761 % buckets + 1).fill_null(0))
    first = torch.arange(len(IDS)) * (buckets + 1)
    return ClickBatch(
        torch.from_numpy(frame[LABEL].to_numpy(writable=True)),
        torch.from_numpy(scaled.to_numpy(order="c", writable=True)),
        torch.from_numpy(hashed.cast(pl.Int64).to_numpy(order="c", writable=True)) + first,
    )


class ClickModel(nn.Module):
    """Embeddings of the ids and a network of the integers; their dot products; a network."""

    def __init__(self, buckets: int, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(len(IDS) * (buckets + 1), width)
        nn.init.normal_(self.table.weight, std=0.1)
        self.bottom = nn.Sequential(
            nn.Linear(len(INTEGERS), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width)
        )
        features = len(IDS) + 1
        self.register_buffer("pairs", torch.triu_indices(features, features, offset=1))
        self.top = nn.Sequential(
            nn.Linear(features * (features - 1) // 2 + width, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        """Return the logits of a click, [B]."""
        dense = self.bottom(batch.integers)
        vectors = torch.cat([dense.unsqueeze(1), self.table(batch.ids)], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = self.get_buffer("pairs")
        logits: Tensor = self.top(torch.cat([dense, products[:, rows, columns]], 1))
        return logits.squeeze(1)

    def loss(self, batch: ClickBatch, logits: Tensor) -> Tensor:
        """Return the mean binary cross-entropy."""
        return functional.binary_cross_entropy_with_logits(logits, batch.labels)
