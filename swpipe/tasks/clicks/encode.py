"""From typed columns to tensors: ids hashed into buckets, integers on a log scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swpipe.tasks.clicks._polars import pl
from swpipe.tasks.clicks._torchrec import KeyedJaggedTensor
from swpipe.tasks.clicks.log import IDS, INTEGERS, LABEL

# Fibonacci hashing (Knuth, TAOCP 3, 6.4): 2**64 over the golden ratio, the product's upper half
# kept.
_MULTIPLIER = 0x9E3779B97F4A7C15
_UPPER_HALF = 1 << 32


@dataclass(frozen=True)
class ClickBatch:
    """One batch as tensors; B rows.

    Attributes:
        labels: [B] float32, 0 or 1.
        dense: [B, 13] float32: ``sign(x) log(1 + |x|)`` of the integers, 0 where missing.
        ids: Buckets of the 26 ids, one bag per row and feature, empty where missing.

    A batch may end in a row without a label, which counts for nothing.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = True) -> ClickBatch:
        """The batch on ``device``; the host does not wait for the copies of a pinned batch."""
        return ClickBatch(
            self.labels.to(device, non_blocking=non_blocking),
            self.dense.to(device, non_blocking=non_blocking),
            self.ids.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Another stream uses the tensors; TorchRec asks batches for this."""
        for part in (self.labels, self.dense, self.ids):
            part.record_stream(stream)

    def pin_memory(self) -> ClickBatch:
        """The batch in page-locked memory, from which a GPU copies by itself."""
        return ClickBatch(self.labels.pin_memory(), self.dense.pin_memory(), self.ids.pin_memory())


def encode(frame: pl.DataFrame, buckets: int) -> ClickBatch:
    """Make tensors of decoded rows.

    Of no rows, ids and integers of one row are made, and no label. TorchRec knows no bags of no
    rows, and other ranks wait for the exchange of ids.

    Args:
        frame: As ``decode`` returns it.
        buckets: Buckets per id feature.
    """
    rows = frame if frame.height else frame.clear(1)
    integers = pl.col(INTEGERS).cast(pl.Float32)
    scaled = (integers.abs().log1p() * integers.sign()).fill_null(0.0)
    return ClickBatch(
        labels=torch.from_numpy(frame[LABEL].cast(pl.Float32).to_numpy(writable=True)),
        dense=torch.from_numpy(rows.select(scaled).to_numpy(order="c", writable=True)),
        ids=_bags(rows.select(IDS), buckets),
    )


def _bags(ids: pl.DataFrame, buckets: int) -> KeyedJaggedTensor:
    """Feature by feature, then row by row: the order of columns, and of a KeyedJaggedTensor."""
    flat = ids.unpivot()["value"]
    present = flat.drop_nulls().cast(pl.UInt64)
    bucket = (present * _MULTIPLIER // _UPPER_HALF % buckets).cast(pl.Int64)
    return KeyedJaggedTensor(
        keys=list(IDS),
        values=torch.from_numpy(bucket.to_numpy(writable=True)),
        lengths=torch.from_numpy(flat.is_not_null().cast(pl.Int32).to_numpy(writable=True)),
        stride=ids.height,
        # Known here, and so not computed on the device, where it would make the host wait.
        length_per_key=[ids.height - nulls for nulls in ids.null_count().row(0)],
    )
