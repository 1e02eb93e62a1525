"""From files to tensors: where batches lie, what malformed rows become, and generated logs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from swpipe._values.walk import tensors_in
from swpipe.tasks.clicks import BatchSpec, ClickDataError, ClickLog, MalformedRowError, generate
from swpipe.tasks.clicks import log as log_module
from swpipe.tasks.clicks.decode import Decoded, decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.generate import PlantedModel, click_logs
from swpipe.tasks.clicks.log import COLUMNS, IDS, INTEGERS
from tests.support.scripts import Script, Scripts
from tests.tasks.clicks.rows import lines, row, write_log

BUCKETS = 97


def written(path: Path, text: str) -> Path:
    """A file of any lines: the log does not look into them."""
    path.write_text(text)
    return path


def decoded(data: bytes, *, strict: bool = False) -> Decoded:
    """Decode lines as if they began at line 1 of ``log.tsv``."""
    return decode(data, BatchSpec(Path("log.tsv"), 0, len(data), 1, data.count(b"\n")), strict)


def encoded(*rows: str) -> ClickBatch:
    """Rows as tensors."""
    return encode(decoded(lines(*rows)).frame, BUCKETS)


# ------------------------------------------------------------------------------- where they lie


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
@pytest.mark.parametrize("end", ["\n", ""])
def test_batches_cover_every_line_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    """Of several files, whatever the block that is searched, with and without a last line end."""
    monkeypatch.setattr(log_module, "_BLOCK", block)
    texts = ["\n\nab\n\nabcdefgh\nx\n" + end, "b1\nb2\nb3" + end, "c" + end]
    paths = [written(tmp_path / str(number), text) for number, text in enumerate(texts)]
    for size in (1, 2, 3, 100):
        log = ClickLog(paths, size)
        specs = list(log.batches())
        read = b"".join(spec.read() for spec in specs).decode()
        assert read == "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)
        assert log.rows == sum(spec.rows for spec in specs) == read.count("\n")
        assert len(log) == len(specs)
        assert all(spec.read().count(b"\n") == spec.rows <= size for spec in specs)
        place = Counter(spec.path for spec in specs)
        assert [*place] == paths
        assert specs[place[paths[0]]].first_line == 1
    assert [spec.first_line for spec in ClickLog(paths[:1], 4).batches()] == [1, 5]


def test_steps_go_through_the_log_again_and_again(tmp_path: Path) -> None:
    """Steps count on; the epoch says how often the rows were met before."""
    log = ClickLog([written(tmp_path / "a", "1\n2\n3\n")], batch_size=2)
    specs = list(log.batches(5))
    assert [(spec.step, spec.epoch) for spec in specs] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert specs[4].offset == specs[0].offset


def test_a_log_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    good, empty = written(tmp_path / "good", "x\n"), written(tmp_path / "empty.tsv", "")
    for paths, told in [
        ([tmp_path / "gone.tsv"], r"gone\.tsv: no such file"),
        ([good, empty], r"empty\.tsv: the file is empty"),
        ([tmp_path], "is not a file"),
        ([], "no click log is given"),
    ]:
        with pytest.raises(ClickDataError, match=told):
            ClickLog(paths, 4)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ClickLog([good], 0)
    (spec,) = ClickLog([written(tmp_path / "a", "1\n2\n3\n")], 3).batches()
    (tmp_path / "a").write_text("1\n")
    with pytest.raises(ClickDataError, match="has become shorter"):
        spec.read()


# ------------------------------------------------------------------------------------ decoding


def test_every_value_of_a_log_arrives(tmp_path: Path) -> None:
    """Decoded values equal those of a plain reading, field by field; an empty one is null."""
    path = write_log(tmp_path / "log.tsv", 60)
    extreme = row({0: "1", 2: "-3", 14: "05db9164", 39: "ffffffff"})
    path.write_bytes(lines(extreme, row(dict.fromkeys(range(1, 40), ""))) + path.read_bytes())
    (spec,) = ClickLog([path], 62).batches()
    frame, rejected = decode(spec.read(), spec)
    assert rejected == ()
    plain = [text.split("\t") for text in path.read_text().splitlines()]
    assert frame["label"].to_list() == [int(fields[0]) for fields in plain]
    for k, name in enumerate(INTEGERS, start=1):
        assert frame[name].to_list() == [int(f[k]) if f[k] else None for f in plain]
    for k, name in enumerate(IDS, start=14):
        assert frame[name].to_list() == [int(f[k], 16) if f[k] else None for f in plain]


BAD = [
    (row({0: "2"}), "label 2 is not 0 or 1"),
    (row({0: ""}), "label (empty) is not 0 or 1"),
    (row({5: "1.5"}), "I5 1.5 is not an integer of 64 bits"),
    (row({13: "9223372036854775808"}), "I13 9223372036854775808 is not an integer of 64 bits"),
    (row({39: "100000000"}), "C26 100000000 is not a hexadecimal id of 32 bits"),
    (row({16: "-1"}), "C3 -1 is not a hexadecimal id of 32 bits"),
    (row({0: "x", 7: "y", 20: "z"}), "label x is not 0 or 1"),  # the first of several
    ("", "1 fields; a row has 40"),
    (row() + "\t", "41 fields; a row has 40"),
    (row()[:-2], "39 fields; a row has 40"),
]
"""A malformed row, and what is said of it."""


def test_malformed_rows_are_left_out_and_reported() -> None:
    """Line, field and text of each, alone and among others, in file order; good ones stay."""
    for bad, reason in BAD:
        frame, (told,) = decoded(lines(row(), bad, row()))
        assert frame.height == 2
        assert str(told) == f"log.tsv:2: {reason}"
    frame, rejected = decoded(lines(*(one for bad, _ in BAD for one in (row(), bad))))
    assert frame.height == len(BAD)
    assert [(told.line, told.reason) for told in rejected] == [
        (2 * number + 2, reason) for number, (_, reason) in enumerate(BAD)
    ]
    assert decoded(lines(*(bad for bad, _ in BAD))).frame.schema == frame.schema
    assert frame.columns == list(COLUMNS)


def test_lines_are_bytes() -> None:
    """A stray byte rejects its row alone; a carriage return belongs to the line end."""
    data = lines(row()) + lines(row()).replace(b"\ta\n", b"\t\xff\n") + lines(row())
    frame, rejected = decoded(data)
    assert (frame.height, [bad.line for bad in rejected]) == (2, [2])
    frame, rejected = decoded(lines(row({39: "b"}), row({39: ""})).replace(b"\n", b"\r\n"))
    assert rejected == ()
    assert frame["C26"].to_list() == [0xB, None]


def test_strict_stops_at_the_first_malformed_row() -> None:
    """The error names it, by its line in the file."""
    assert decoded(lines(row(), row()), strict=True).frame.height == 2
    spec = BatchSpec(Path("a.tsv"), 900, 0, 101, 3)
    with pytest.raises(MalformedRowError, match=r"a\.tsv:102: I1 x is not an integer") as caught:
        decode(lines(row(), row({1: "x"}), ""), spec, strict=True)
    assert caught.value.row.line == 102


# ------------------------------------------------------------------------------------ encoding


def bucket(id_: int) -> int:
    """The bucket of an id, worked out in Python's own integers."""
    return (id_ * 0x9E3779B97F4A7C15 % 2**64 >> 32) % BUCKETS


def test_integers_are_scaled_and_ids_hashed() -> None:
    """A logarithm that keeps the sign, 0 where missing; buckets row by row, an empty bag."""
    batch = encoded(
        row({0: "1", 1: "100", 2: "-3", 3: "", 14: "5", 15: "1", 39: "ffffffff"}),
        row({14: "7", 15: "", 39: "0"}),
        row({15: "3", 39: ""}),
    )
    assert batch.labels.tolist() == [1.0, 0.0, 0.0]
    assert batch.dense.shape == (3, 13)
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    expected = torch.tensor([math.log(101), -math.log(4), 0.0, math.log(2)])
    assert torch.allclose(batch.dense[0, :4], expected)
    assert batch.ids["C1"].values().tolist() == [bucket(5), bucket(7), bucket(0xA)]
    assert batch.ids["C2"].values().tolist() == [bucket(1), bucket(3)]
    assert batch.ids["C2"].lengths().tolist() == [1, 0, 1]
    assert batch.ids["C26"].values().tolist() == [bucket(0xFFFFFFFF), bucket(0)]
    # Known beforehand, so that the device need not be asked.
    known = batch.ids.length_per_key_or_none()
    assert known == batch.ids.lengths().view(len(IDS), 3).sum(dim=1).tolist()


def test_a_batch_without_rows_has_one_without_a_label() -> None:
    """All its rows may have been malformed; what is computed of that one counts for nothing."""
    batch = encode(decoded(lines("x")).frame, BUCKETS)
    assert batch.labels.shape == (0,)
    assert batch.dense.tolist() == [[0.0] * 13]
    assert batch.ids.stride() == 1
    assert batch.ids.values().numel() == 0


def test_moving_a_batch_moves_all_of_it() -> None:
    """Labels, integers and ids go to the device together; the engine sees all of them."""
    batch = encoded(row({14: ""}), row())
    moved = batch.to(torch.device("meta"))
    tensors = list(tensors_in(moved))
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    parts = (moved.labels, moved.dense, moved.ids.values(), moved.ids.lengths())
    assert {id(part) for part in parts} <= {id(tensor) for tensor in tensors}
    assert moved.ids.length_per_key_or_none() == batch.ids.length_per_key_or_none()
    assert batch.labels.device.type == "cpu"


# ----------------------------------------------------------------------------------- generated


def all_rows(path: Path) -> Decoded:
    """Of a log."""
    (spec,) = ClickLog([path], 1_000_000).batches()
    return decode(spec.read(), spec)


def test_a_generated_log_looks_like_a_click_log(tmp_path: Path) -> None:
    """Clicks are the smaller part, values are missing, ids follow Zipf; two parts, no bad row."""
    told: list[int] = []
    logs = click_logs(tmp_path, train_rows=5000, held_out_rows=500, progress=told.append)
    train, held_out = all_rows(logs.train), all_rows(logs.held_out)
    assert (train.frame.height, held_out.frame.height, sum(told)) == (5000, 500, 5500)
    assert train.rejected == held_out.rejected == ()
    assert not {*logs.train.read_bytes().split()} & {*logs.held_out.read_bytes().splitlines()}
    frame = train.frame
    assert 0.1 < float(np.mean(frame["label"].to_numpy())) < 0.4
    assert min(frame["I12"].null_count(), frame["C22"].null_count()) > 3000
    assert frame["C1"].null_count() == 0
    assert frame["I2"].to_numpy().min() < 0
    counts = [count for _, count in Counter(frame["C3"].drop_nulls()).most_common()]
    assert 1.6 < counts[0] / counts[1] < 2.8
    assert len(counts) > 800
    assert all(names.n_unique() == len(names) for names in PlantedModel(0)._names)


def test_a_log_is_generated_once_per_seed_and_size(tmp_path: Path) -> None:
    """Byte for byte the same; another seed makes another; what is there is not written again."""
    first, second, other = (
        click_logs(tmp_path / name, train_rows=200, held_out_rows=10, seed=seed)
        for name, seed in (("1", 0), ("2", 0), ("3", 1))
    )
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.train.read_bytes() != other.train.read_bytes()
    told: list[int] = []
    again = click_logs(tmp_path / "1", train_rows=200, held_out_rows=20, progress=told.append)
    assert again.train == first.train
    assert told == [20]


def test_what_is_broken_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half file is left to be mistaken for a whole one."""
    monkeypatch.setattr(generate, "_CHUNK", 50)

    def broken_off(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        click_logs(tmp_path, train_rows=200, held_out_rows=10, progress=broken_off)
    assert list(tmp_path.iterdir()) == []


def test_polars_takes_one_thread(scripts: Scripts) -> None:
    """Two pools of as many threads as there are cores would fight."""
    code = (
        "import os\n"
        "os.environ.pop('POLARS_MAX_THREADS', None)  # which tests here may set\n"
        "from swpipe.tasks.clicks._polars import pl\n"
        "print(pl.thread_pool_size())\n"
    )
    assert scripts.run(Script(code)) == (0, "1\n", "")
