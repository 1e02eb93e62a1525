"""From bytes to columns, and what becomes of malformed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from swpipe.tasks.clicks.decode import Decoded, MalformedRowError, decode
from swpipe.tasks.clicks.log import COLUMNS, IDS, INTEGERS, ClickLog, RowRange
from tests.tasks.clicks.rows import lines, row, write_log

FILE = Path("log.tsv")


def decoded(data: bytes, *, strict: bool = False) -> Decoded:
    """Decode lines as if they began at line 1 of ``FILE``."""
    return decode(data, [RowRange(FILE, 0, len(data), 1, data.count(b"\n"))], strict)


def rejected(data: bytes) -> dict[int, str]:
    """Line to reason."""
    return {bad.line: bad.reason for bad in decoded(data).rejected}


def test_good_rows_come_out_typed() -> None:
    """Labels, integers (negative ones too) and hexadecimal ids become numbers."""
    frame = decoded(lines(row({0: "1", 2: "-3", 14: "05db9164", 39: "ffffffff"}))).frame
    assert frame.columns == list(COLUMNS)
    (values,) = frame.rows()
    assert values[:3] == (1, 1, -3)
    assert (values[14], values[39]) == (0x05DB9164, 0xFFFFFFFF)


def test_missing_values_are_null() -> None:
    """An empty integer or id is missing, and its row is good."""
    result = decoded(lines(row({1: "", 13: "", 14: "", 39: ""})))
    assert result.rejected == ()
    (values,) = result.frame.rows()
    assert [values[k] for k in (1, 13, 14, 39)] == [None] * 4


def test_everything_but_the_label_may_be_missing() -> None:
    """A row of a label and 39 empty fields is good."""
    result = decoded(lines(row(dict.fromkeys(range(1, 40), ""))))
    assert result.frame.height == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({0: "2"}, "label 2 is not 0 or 1"),
        ({0: ""}, "label (empty) is not 0 or 1"),
        ({0: "1.0"}, "label 1.0 is not 0 or 1"),
        ({5: "x"}, "I5 x is not an integer of 64 bits"),
        ({5: "1.5"}, "I5 1.5 is not an integer of 64 bits"),
        ({13: "9223372036854775808"}, "I13 9223372036854775808 is not an integer of 64 bits"),
        ({14: "xyz"}, "C1 xyz is not a hexadecimal id of 32 bits"),
        ({39: "100000000"}, "C26 100000000 is not a hexadecimal id of 32 bits"),
        ({16: "-1"}, "C3 -1 is not a hexadecimal id of 32 bits"),
        ({16: '"a"'}, 'C3 "a" is not a hexadecimal id of 32 bits'),
    ],
)
def test_a_field_that_does_not_parse_rejects_its_row(fields: dict[int, str], reason: str) -> None:
    """The row is dropped, and the report names line, field and text; its neighbours stay."""
    result = decoded(lines(row(), row(fields), row()))
    assert result.frame.height == 2
    (bad,) = result.rejected
    assert (bad.path, bad.line, bad.reason) == (FILE, 2, reason)
    assert str(bad) == f"log.tsv:2: {reason}"


@pytest.mark.parametrize(
    ("text", "fields"), [("", 1), ("0\t1", 2), (row() + "\t", 41), (row()[:-2], 39)]
)
def test_a_wrong_number_of_fields_rejects_the_row(text: str, fields: int) -> None:
    """Too few and too many alike, the empty line included."""
    assert rejected(lines(row(), text, row())) == {2: f"{fields} fields; a row has 40"}


def test_a_long_and_a_short_row_do_not_make_up_for_each_other() -> None:
    """Fields are counted line by line, not over the whole batch."""
    bad = rejected(lines(row() + "\ta", row()[:-2], row()))
    assert bad == {1: "41 fields; a row has 40", 2: "39 fields; a row has 40"}


def test_rejected_rows_keep_the_order_of_the_file() -> None:
    """Whatever is wrong with them."""
    data = lines(row({0: "2"}), "", row(), row({3: "?"}), "x\ty")
    assert list(rejected(data)) == [1, 2, 4, 5]


def test_a_row_with_two_faults_is_reported_once() -> None:
    """By the first of them."""
    assert rejected(lines(row({0: "x", 7: "y", 20: "z"}))) == {1: "label x is not 0 or 1"}


def test_bytes_that_are_no_text_reject_their_row() -> None:
    """A stray byte cannot stop the batch."""
    data = lines(row()) + lines(row()).replace(b"\ta\n", b"\t\xff\n") + lines(row())
    result = decoded(data)
    assert result.frame.height == 2
    assert [bad.line for bad in result.rejected] == [2]


def test_lines_may_end_as_on_windows() -> None:
    """A carriage return before the line end belongs to the line end."""
    result = decoded(lines(row({39: "b"}), row({39: ""}), row()).replace(b"\n", b"\r\n"))
    assert result.rejected == ()
    assert result.frame["C26"].to_list() == [0xB, None, 0xA]


def test_a_batch_of_malformed_rows_only_is_empty() -> None:
    """It has all columns, of the right types, and no row."""
    good = decoded(lines(row())).frame
    frame = decoded(lines("", "x")).frame
    assert frame.height == 0
    assert frame.schema == good.schema


def test_lines_are_counted_in_their_own_file() -> None:
    """In a batch of two ranges each report names the range's file and line."""
    first, second = lines(row(), row({0: "7"})), lines(row({1: "x"}), row())
    ranges = [
        RowRange(Path("a.tsv"), 900, len(first), 101, 2),
        RowRange(Path("b.tsv"), 0, len(second), 1, 2),
    ]
    bad = decode(first + second, ranges).rejected
    assert [(row.path.name, row.line) for row in bad] == [("a.tsv", 102), ("b.tsv", 1)]


def test_strict_stops_at_the_first_malformed_row() -> None:
    """The error names it."""
    with pytest.raises(MalformedRowError, match=r"log\.tsv:2: I1 x is not an integer") as caught:
        decoded(lines(row(), row({1: "x"}), ""), strict=True)
    assert caught.value.row.line == 2


def test_strict_lets_good_rows_pass() -> None:
    """There is nothing to stop at."""
    assert decoded(lines(row(), row()), strict=True).frame.height == 2


def test_every_value_of_a_log_arrives(tmp_path: Path) -> None:
    """Decoded values equal those of a plain reading, field by field."""
    path = write_log(tmp_path / "log.tsv", 60)
    (spec,) = ClickLog([path], 60).batches()
    frame = decode(path.read_bytes(), spec.ranges).frame
    plain = [text.split("\t") for text in path.read_text().splitlines()]
    assert frame["label"].to_list() == [int(fields[0]) for fields in plain]
    for k, name in enumerate(INTEGERS, start=1):
        assert frame[name].to_list() == [int(f[k]) if f[k] else None for f in plain]
    for k, name in enumerate(IDS, start=14):
        assert frame[name].to_list() == [int(f[k], 16) if f[k] else None for f in plain]
