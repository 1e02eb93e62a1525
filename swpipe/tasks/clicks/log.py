"""Click logs on disk: the file format, and where each batch's rows lie.

A log is one or several files of tab-separated rows in the format of the Criteo display-advertising
data: a label (0 or 1), 13 integer features (which may be negative), 26 ids in hexadecimal; no
header, and an empty field is a missing value.

``ClickLog`` finds the line ends of all files once. What it hands out are addresses (``BatchSpec``),
so iterating is cheap, and reading the rows is a task.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swpipe.tasks.workload import InputError

LABEL = "label"
INTEGERS = tuple(f"I{k}" for k in range(1, 14))
IDS = tuple(f"C{k}" for k in range(1, 27))
COLUMNS = (LABEL, *INTEGERS, *IDS)
"""The 40 columns, in file order, under the names the format's own documentation uses."""

_BLOCK = 1 << 22  # bytes that are searched for line ends at once


class ClickDataError(InputError):
    """A click log that cannot be used: missing, empty, or changed while it is read."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Whole lines that follow each other in one file.

    Attributes:
        path: The file.
        offset: First byte, from 0.
        length: Bytes, the last line end included where the file has one there.
        first_line: Number of the first line in the file, from 1.
        rows: How many lines.
    """

    path: Path
    offset: int
    length: int
    first_line: int
    rows: int

    def read(self) -> bytes:
        """The bytes of these lines, always ending in a line end.

        Raises:
            ClickDataError: The file is gone, or has become shorter since it was indexed.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                data = file.read(self.length)
        except OSError as error:
            raise ClickDataError(
                f"{self.path}: {error.strerror or error}; keep the file while it is read"
            ) from error
        if len(data) != self.length:
            raise ClickDataError(
                f"{self.path}: the file has become shorter: bytes {self.offset} to "
                f"{self.offset + self.length} are missing; do not change it while it is read"
            )
        return data if data.endswith(b"\n") else data + b"\n"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Where one batch's rows lie.

    Attributes:
        step: Number of the batch in the run, from 0.
        epoch: How many times the log was read completely before.
        ranges: In order; more than one where the batch continues in the next file.
    """

    step: int
    epoch: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Lines in the batch, malformed ones included."""
        return sum(part.rows for part in self.ranges)


class ClickLog:
    """The rows of several files, one after the other, cut into batches.

    Args:
        paths: The files, in order. Each is scanned once for line ends, here.
        batch_size: Rows per batch. A batch may continue in the next file; only the last one may be
            shorter.

    Raises:
        ClickDataError: No file is given, or one is missing or empty.
        ValueError: ``batch_size`` is less than 1.
    """

    def __init__(self, paths: Sequence[str | Path], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be 1 row or more")
        if not paths:
            raise ClickDataError("no click log is given: name at least one file")
        self.paths = tuple(Path(path) for path in paths)
        for path in self.paths:
            if fault := _fault(path):
                raise ClickDataError(f"{path}: {fault}; give a click log in the Criteo TSV format")
        self._parts = _cut(self.paths, batch_size)
        self.rows = sum(part.rows for parts in self._parts for part in parts)

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._parts)

    def batches(self, steps: int | None = None) -> Iterator[BatchSpec]:
        """Addresses of batches: one epoch, or ``steps`` batches over as many epochs as it takes."""
        count = len(self) if steps is None else steps
        for step in range(count):
            epoch, index = divmod(step, len(self))
            yield BatchSpec(step, epoch, self._parts[index])


def _fault(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is not a file"
        with path.open("rb") as file:
            return "" if file.read(1) else "the file is empty"
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return error.strerror or str(error)


def _cut(paths: Sequence[Path], batch_size: int) -> tuple[tuple[RowRange, ...], ...]:
    batches: list[tuple[RowRange, ...]] = []
    parts: list[RowRange] = []  # of the batch that is not full yet
    missing = batch_size  # rows it still needs
    for path in paths:
        offset, line, rows, size = 0, 1, 0, 0
        for ends in _line_ends(path):
            taken = 0
            while len(ends) - taken >= missing:
                taken += missing
                rows += missing
                end = int(ends[taken - 1])
                batches.append((*parts, RowRange(path, offset, end - offset, line, rows)))
                parts, missing = [], batch_size
                offset, line, rows = end, line + rows, 0
            left = len(ends) - taken
            rows, missing = rows + left, missing - left
            size = int(ends[-1])
        if rows:
            parts.append(RowRange(path, offset, size - offset, line, rows))
    return tuple(batches) if not parts else (*batches, tuple(parts))


def _line_ends(path: Path) -> Iterator[NDArray[np.int64]]:
    """Offsets just past each line, block by block; a last line without a line end counts as one."""
    offset, last = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (offset + 1)
            offset += len(block)
            if len(ends):
                last = int(ends[-1])
                yield ends
    if last < offset:
        yield np.array([offset], dtype=np.int64)
