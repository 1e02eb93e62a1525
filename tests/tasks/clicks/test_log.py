"""Where batches lie in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from swpipe.tasks.clicks import log as log_module
from swpipe.tasks.clicks.log import BatchSpec, ClickDataError, ClickLog, RowRange


def write(path: Path, text: str) -> Path:
    """A file of any lines: the log does not look into them."""
    path.write_text(text)
    return path


def read(spec: BatchSpec) -> str:
    """The lines of a batch."""
    return b"".join(part.read() for part in spec.ranges).decode()


def test_batches_cover_every_line_once_in_order(tmp_path: Path) -> None:
    """Read one after the other, the batches give the file."""
    text = "".join(f"line {n}\n" for n in range(25))
    log = ClickLog([write(tmp_path / "a", text)], batch_size=4)
    specs = list(log.batches())
    assert "".join(map(read, specs)) == text
    assert [spec.rows for spec in specs] == [4, 4, 4, 4, 4, 4, 1]
    assert (len(log), log.rows) == (7, 25)


def test_a_batch_goes_on_in_the_next_file(tmp_path: Path) -> None:
    """What is left of one file and the beginning of the next make one batch."""
    paths = [write(tmp_path / "a", "a1\na2\na3\n"), write(tmp_path / "b", "b1\nb2\nb3\n")]
    specs = list(ClickLog(paths, batch_size=2).batches())
    assert list(map(read, specs)) == ["a1\na2\n", "a3\nb1\n", "b2\nb3\n"]
    assert specs[1].ranges == (
        RowRange(paths[0], offset=6, length=3, first_line=3, rows=1),
        RowRange(paths[1], offset=0, length=3, first_line=1, rows=1),
    )
    assert specs[2].ranges[0].first_line == 2


def test_a_batch_may_span_many_small_files(tmp_path: Path) -> None:
    """Files shorter than a batch are joined until it is full."""
    paths = [write(tmp_path / str(n), f"{n}\n") for n in range(5)]
    specs = list(ClickLog(paths, batch_size=3).batches())
    assert list(map(read, specs)) == ["0\n1\n2\n", "3\n4\n"]


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    """It is read with a line end, so that another file's line can follow."""
    paths = [write(tmp_path / "a", "a1\na2"), write(tmp_path / "b", "b1")]
    (spec,) = ClickLog(paths, batch_size=10).batches()
    assert read(spec) == "a1\na2\nb1\n"
    assert spec.rows == 3


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_lines_are_found_whatever_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Line ends at the edges of blocks, and lines longer than a block, are no trouble."""
    monkeypatch.setattr(log_module, "_BLOCK", block)
    text = "\n\nab\n\nabcdefgh\nx\n\n"
    specs = list(ClickLog([write(tmp_path / "a", text)], batch_size=2).batches())
    assert list(map(read, specs)) == ["\n\n", "ab\n\n", "abcdefgh\nx\n", "\n"]


def test_steps_go_through_the_log_again_and_again(tmp_path: Path) -> None:
    """Steps count on; the epoch says how often the rows were met before."""
    log = ClickLog([write(tmp_path / "a", "1\n2\n3\n")], batch_size=2)
    specs = list(log.batches(5))
    assert [(spec.step, spec.epoch) for spec in specs] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert specs[4].ranges == specs[0].ranges


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The error says which file."""
    with pytest.raises(ClickDataError, match=r"gone\.tsv: no such file"):
        ClickLog([tmp_path / "gone.tsv"], 4)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    """An empty file is an error, even beside a good one."""
    paths = [write(tmp_path / "good.tsv", "x\n"), write(tmp_path / "empty.tsv", "")]
    with pytest.raises(ClickDataError, match=r"empty\.tsv: the file is empty"):
        ClickLog(paths, 4)


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    """The error says so."""
    with pytest.raises(ClickDataError, match="is not a file"):
        ClickLog([tmp_path], 4)


def test_no_file_at_all_is_an_error() -> None:
    """There is nothing to train on."""
    with pytest.raises(ClickDataError, match="no click log is given"):
        ClickLog([], 4)


def test_a_batch_has_a_row_at_least(small_log: Path) -> None:
    """The batch size is checked."""
    with pytest.raises(ValueError, match="batch_size is 0"):
        ClickLog([small_log], 0)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    """Half a batch is not passed off as a whole one."""
    path = write(tmp_path / "a", "1\n2\n3\n")
    (spec,) = ClickLog([path], 3).batches()
    path.write_text("1\n")
    with pytest.raises(ClickDataError, match="has become shorter"):
        read(spec)
