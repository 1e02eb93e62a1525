"""Made-up click logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from swpipe.tasks.clicks import generate
from swpipe.tasks.clicks.decode import Decoded, decode
from swpipe.tasks.clicks.generate import PlantedModel, click_logs
from swpipe.tasks.clicks.log import ClickLog


def decoded(path: Path) -> Decoded:
    """All rows of a log."""
    (spec,) = ClickLog([path], 1_000_000).batches()
    return decode(path.read_bytes(), spec.ranges)


def test_a_made_up_log_keeps_to_the_format(tmp_path: Path) -> None:
    """Both parts have the rows asked for, and none of them is malformed."""
    logs = click_logs(tmp_path, train_rows=3000, held_out_rows=500)
    train, held_out = decoded(logs.train), decoded(logs.held_out)
    assert (train.frame.height, held_out.frame.height) == (3000, 500)
    assert train.rejected == held_out.rejected == ()


def test_it_looks_like_a_click_log(tmp_path: Path) -> None:
    """Clicks are the smaller part, values are missing, integers may be negative."""
    frame = decoded(click_logs(tmp_path, train_rows=5000, held_out_rows=1).train).frame
    assert 0.1 < float(np.mean(frame["label"].to_numpy())) < 0.4
    assert frame["I12"].null_count() > 3000
    assert frame["C22"].null_count() > 3000
    assert frame["C1"].null_count() == 0
    assert frame["I2"].to_numpy().min() < 0


def test_ids_follow_zipf() -> None:
    """The commonest id comes about twice as often as the next, and has no end of rare company."""
    rows = PlantedModel(0).rows(20_000, np.random.default_rng(0))
    counts = [count for _, count in Counter(rows["C3"].drop_nulls()).most_common()]
    assert 1.8 < counts[0] / counts[1] < 2.6
    assert len(counts) > 1500


def test_the_same_seed_makes_the_same_log(tmp_path: Path) -> None:
    """Byte for byte; another seed makes another."""
    first = click_logs(tmp_path / "1", train_rows=200, held_out_rows=10)
    second = click_logs(tmp_path / "2", train_rows=200, held_out_rows=10)
    other = click_logs(tmp_path / "3", train_rows=200, held_out_rows=10, seed=1)
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.train.read_bytes() != other.train.read_bytes()


def test_held_out_rows_are_other_rows(tmp_path: Path) -> None:
    """They come from the same model by other draws."""
    logs = click_logs(tmp_path, train_rows=300, held_out_rows=300)
    train, held_out = (set(p.read_bytes().splitlines()) for p in (logs.train, logs.held_out))
    assert not train & held_out


def test_a_log_is_made_once(tmp_path: Path) -> None:
    """The second call writes nothing, and so reports no rows."""
    written: list[int] = []
    first = click_logs(tmp_path, train_rows=200, held_out_rows=50, progress=written.append)
    stamp = first.train.stat().st_mtime_ns
    assert click_logs(tmp_path, train_rows=200, held_out_rows=50, progress=written.append) == first
    assert first.train.stat().st_mtime_ns == stamp
    assert sum(written) == 250


def test_other_sizes_are_other_files(tmp_path: Path) -> None:
    """A log of another size does not pass for the one asked for."""
    few = click_logs(tmp_path, train_rows=10, held_out_rows=10)
    more = click_logs(tmp_path, train_rows=20, held_out_rows=10)
    assert few.train != more.train
    assert few.held_out == more.held_out


def test_what_is_broken_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half file is left to be mistaken for a whole one."""
    monkeypatch.setattr(generate, "_CHUNK", 50)

    def broken_off(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        click_logs(tmp_path, train_rows=200, held_out_rows=10, progress=broken_off)
    assert list(tmp_path.iterdir()) == []


def test_ids_of_a_feature_are_distinct() -> None:
    """No two ids share their hexadecimal digits."""
    for names in PlantedModel(0)._names:
        assert names.n_unique() == len(names)
