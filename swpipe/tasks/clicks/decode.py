"""From bytes to typed columns; malformed rows are left out and reported.

A row is malformed when it has not 40 fields, its label is neither 0 nor 1, an integer does not
parse, or an id is not a hexadecimal number of at most 32 bits. The search for such rows is
vectorised, and costs a comparison of two counts where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swpipe.core.messages import MOST_CHARACTERS, one_line, plain
from swpipe.tasks.clicks._polars import pl
from swpipe.tasks.clicks.log import COLUMNS, IDS, INTEGERS, LABEL, BatchSpec, ClickDataError

_LABELS = pl.col(LABEL).replace_strict({"0": 0, "1": 1}, default=None, return_dtype=pl.UInt8)
_TYPED = (
    _LABELS,
    pl.col(INTEGERS).cast(pl.Int64, strict=False),
    pl.col(IDS).str.to_integer(base=16, dtype=pl.UInt32, strict=False),
)
_TEXT = "text of "  # prefix of the columns as they stood in the file


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A malformed row.

    Attributes:
        path: Its file.
        line: Its line, from 1.
        reason: What is wrong with it, in words.
    """

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{plain(str(self.path))}:{self.line}: {one_line(self.reason, MOST_CHARACTERS)}"


class MalformedRowError(ClickDataError):
    """The first malformed row, ``row``, in strict mode."""

    def __init__(self, row: RejectedRow) -> None:
        super().__init__(f"{row}. Fix the row; without strict such rows are dropped and counted")
        self.row = row


class Decoded(NamedTuple):
    """The rows of one batch.

    Attributes:
        frame: One row per good row: ``label`` (u8), ``I1``..``I13`` (i64), ``C1``..``C26`` (u32); a
            missing value is null.
        rejected: The malformed rows, in file order.
    """

    frame: pl.DataFrame
    rejected: tuple[RejectedRow, ...]


def decode(data: bytes, spec: BatchSpec, strict: bool = False) -> Decoded:
    """Parse the lines of a batch, each ending in a line end.

    Args:
        data: What ``spec.read`` gave.
        spec: Where they came from, for reporting.
        strict: Raise at the first malformed row instead of leaving it out.

    Raises:
        MalformedRowError: ``strict``, and a row is malformed.
    """
    data, lines, rejected = _whole_rows(data)
    schema = dict.fromkeys(COLUMNS, pl.String)
    text = pl.DataFrame(schema=schema)
    if data:
        text = pl.read_csv(
            data, has_header=False, separator="\t", quote_char=None, schema=schema,
            encoding="utf8-lossy",
        )  # fmt: skip
    frame = text.select(_TYPED)
    if _nulls(frame) != _nulls(text) or frame[LABEL].null_count():
        reasons = _reasons(text, frame)
        bad = reasons.is_not_null()
        rejected |= dict(zip(lines[bad.to_numpy()].tolist(), reasons.filter(bad), strict=True))
        frame = frame.filter(~bad)
    named = tuple(
        RejectedRow(spec.path, spec.first_line + line, rejected[line]) for line in sorted(rejected)
    )
    if strict and named:
        raise MalformedRowError(named[0])
    return Decoded(frame, named)


def _whole_rows(data: bytes) -> tuple[bytes, NDArray[np.int64], dict[int, str]]:
    """Keep the lines with the right number of fields.

    Returns:
        Those lines; each one's number in ``data``, from 0; number and reason of the others.
    """
    bytes_ = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(bytes_ == ord("\n"))
    separators = np.flatnonzero((bytes_ == ord("\t")) | (bytes_ == ord("\n")))
    width, lines = len(COLUMNS), np.arange(len(ends))
    if len(separators) == width * len(ends) and (separators[width - 1 :: width] == ends).all():
        return data, lines, {}
    fields = np.diff(np.searchsorted(separators, ends, side="right"), prepend=0)
    good = fields == width
    kept = bytes_[np.repeat(good, np.diff(ends, prepend=-1))].tobytes()
    rejected = {int(k): f"{fields[k]} fields; a row has {width}" for k in np.flatnonzero(~good)}
    return kept, lines[good], rejected


def _nulls(frame: pl.DataFrame) -> tuple[int, ...]:
    return frame.null_count().row(0) if frame.height else ()


def _reasons(text: pl.DataFrame, frame: pl.DataFrame) -> pl.Series:
    """What is wrong with each row, in words; null where nothing is."""
    rules = {
        LABEL: "0 or 1",
        **dict.fromkeys(INTEGERS, "an integer of 64 bits"),
        **dict.fromkeys(IDS, "a hexadecimal id of 32 bits"),
    }
    checks = []
    for name, rule in rules.items():
        given, lost = pl.col(_TEXT + name), pl.col(name).is_null()
        if name != LABEL:  # which may not be missing
            lost &= given.is_not_null()
        told = pl.format(f"{name} {{}} is not {rule}", given.fill_null("(empty)"))
        checks.append(pl.when(lost).then(told))
    both = frame.hstack(text.rename(lambda name: _TEXT + name))
    return both.select(pl.coalesce(checks).alias("reason"))["reason"]
