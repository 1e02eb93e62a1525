"""From columns to tensors."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest
import torch

from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.log import IDS, ClickLog, RowRange
from tests.tasks.rows import lines, row

BUCKETS = 97


def frame_of(*rows: str) -> pl.DataFrame:
    """Rows, decoded."""
    data = lines(*rows)
    return decode(data, [RowRange(Path("x"), 0, len(data), 1, len(rows))]).frame


def bucket(id_: int) -> int:
    """The bucket of an id, worked out in Python's own integers."""
    return (id_ * 0x9E3779B97F4A7C15 % 2**64 >> 32) % BUCKETS


def test_labels_and_integers_become_float32() -> None:
    """Integers are tamed by a logarithm that keeps their sign; missing ones are 0."""
    batch = encode(frame_of(row({0: "1", 1: "100", 2: "-3", 3: ""}), row()), BUCKETS)
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.dense.shape == (2, 13)
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    expected = torch.tensor([math.log(101), -math.log(4), 0.0, math.log(2)])
    assert torch.allclose(batch.dense[0, :4], expected)


def test_ids_land_in_their_buckets_row_by_row() -> None:
    """Each feature has its ids' buckets in the order of the rows."""
    batch = encode(frame_of(row({14: "5", 39: "ffffffff"}), row({14: "7", 39: "0"})), BUCKETS)
    assert batch.ids["C1"].values().tolist() == [bucket(5), bucket(7)]
    assert batch.ids["C26"].values().tolist() == [bucket(0xFFFFFFFF), bucket(0)]
    assert batch.ids["C2"].values().tolist() == [bucket(0xA)] * 2


def test_a_missing_id_is_an_empty_bag() -> None:
    """It takes up no bucket, and its neighbours stay where they are."""
    batch = encode(frame_of(row({15: "1"}), row({15: ""}), row({15: "3"})), BUCKETS)
    assert batch.ids["C2"].lengths().tolist() == [1, 0, 1]
    assert batch.ids["C2"].values().tolist() == [bucket(1), bucket(3)]


def test_lengths_per_feature_are_known_beforehand() -> None:
    """So the device need not be asked, and they are right."""
    batch = encode(frame_of(row({14: ""}), row({16: ""}), row({16: ""})), BUCKETS)
    known = batch.ids.length_per_key_or_none()
    assert known == batch.ids.lengths().view(len(IDS), 3).sum(dim=1).tolist()
    assert known[:3] == [2, 3, 1]


def test_all_buckets_are_within_bounds(small_log: Path) -> None:
    """Whatever the id."""
    (spec,) = ClickLog([small_log], 50).batches()
    batch = encode(decode(small_log.read_bytes(), spec.ranges).frame, BUCKETS)
    assert int(batch.ids.values().min()) >= 0
    assert int(batch.ids.values().max()) < BUCKETS


def test_a_batch_without_rows_has_one_without_a_label() -> None:
    """All its rows may have been malformed; what is computed of that one counts for nothing."""
    batch = encode(frame_of(row()).clear(), BUCKETS)
    assert batch.labels.shape == (0,)
    assert batch.dense.tolist() == [[0.0] * 13]
    assert batch.ids.stride() == 1
    assert batch.ids.values().numel() == 0


def test_moving_a_batch_moves_all_of_it() -> None:
    """Labels, integers and ids go to the device together; what was there stays."""
    batch = encode(frame_of(row({14: ""}), row()), BUCKETS)
    moved = batch.to(torch.device("meta"))
    assert {moved.labels.device.type, moved.dense.device.type} == {"meta"}
    assert moved.ids.values().device.type == "meta"
    assert moved.ids.length_per_key_or_none() == batch.ids.length_per_key_or_none()
    assert batch.labels.device.type == "cpu"


def test_tensors_of_a_batch_are_seen_by_the_engine() -> None:
    """The engine holds a context's tensors by looking into it: none may hide."""
    from swpipe._values.walk import tensors_in

    batch: ClickBatch = encode(frame_of(row(), row({20: ""})), BUCKETS)
    seen = {id(tensor) for tensor in tensors_in(batch)}
    hidden = (batch.labels, batch.dense, batch.ids.values(), batch.ids.lengths())
    assert {id(tensor) for tensor in hidden} <= seen


@pytest.mark.parametrize("buckets", [1, 2, 4096, 2**31])
def test_any_number_of_buckets_will_do(buckets: int) -> None:
    """From one to more than there are ids."""
    values = encode(frame_of(row({14: "fedcba98"})), buckets).ids["C1"].values()
    assert values.tolist() == [(0xFEDCBA98 * 0x9E3779B97F4A7C15 % 2**64 >> 32) % buckets]
