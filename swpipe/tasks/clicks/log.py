"""Click logs on disk: the file format, and where each batch's rows lie.

A log is one or several files of tab-separated rows in the format of the Criteo display-advertising
data: a label (0 or 1), 13 integer features (which may be negative), 26 ids in hexadecimal; no
header, and an empty field is a missing value.

``ClickLog`` finds the line ends of all files once. What it hands out are addresses (``BatchSpec``),
so iterating is cheap, and reading the rows is a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

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
class BatchSpec:
    """Where one batch's rows lie: whole lines that follow each other in one file.

    Attributes:
        path: The file.
        offset: First byte, from 0.
        length: Bytes, the last line end included where the file has one there.
        first_line: Number of the first line in the file, from 1.
        rows: How many lines, malformed ones included; 0 for a batch without rows.
        step: Number of the batch in the run, from 0.
        epoch: How many times the log was read completely before.
    """

    path: Path
    offset: int
    length: int
    first_line: int
    rows: int
    step: int = 0
    epoch: int = 0

    def read(self) -> bytes:
        """The bytes of these lines, always ending in a line end.

        Raises:
            ClickDataError: The file is gone, or has become shorter since it was indexed.
        """
        if not self.rows:
            return b""
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


class ClickLog:
    """The rows of several files, one after the other, cut into batches.

    Args:
        paths: The files, in order. Each is scanned once for line ends, here.
        batch_size: Rows per batch; the last one of each file may be shorter.

    Attributes:
        rows: In all files together.

    Raises:
        ClickDataError: No file is given, or one is missing or empty.
        ValueError: ``batch_size`` is less than 1.
    """

    def __init__(self, paths: Sequence[str | Path], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be 1 row or more")
        if not paths:
            raise ClickDataError("no click log is given: name at least one file")
        self._parts = [part for path in map(Path, paths) for part in _parts(path, batch_size)]
        self.rows = sum(part.rows for part in self._parts)

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._parts)

    def batches(self, steps: int | None = None) -> Iterator[BatchSpec]:
        """Addresses of batches: one epoch, or ``steps`` batches over as many epochs as it takes."""
        for step in range(len(self) if steps is None else steps):
            epoch, index = divmod(step, len(self))
            yield replace(self._parts[index], step=step, epoch=epoch)


def _parts(path: Path, batch_size: int) -> list[BatchSpec]:
    parts, fault = [], ""
    try:
        if path.exists() and not path.is_file():
            fault = "is not a file"
        elif not (parts := [*_cut(path, batch_size)]):
            fault = "the file is empty"
    except FileNotFoundError:
        fault = "no such file"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        raise ClickDataError(f"{path}: {fault}; give a click log in the Criteo TSV format")
    return parts


def _cut(path: Path, batch_size: int) -> Iterator[BatchSpec]:
    offset, line, rows, size, ended = 0, 1, 0, 0, True  # rows: of the batch that is not full yet
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (size + 1)
            for end in ends[batch_size - rows - 1 :: batch_size].tolist():
                yield BatchSpec(path, offset, end - offset, line, batch_size)
                offset, line = end, line + batch_size
            rows = (rows + len(ends)) % batch_size
            size, ended = size + len(block), block.endswith(b"\n")
    if offset < size:
        yield BatchSpec(path, offset, size - offset, line, rows + (not ended))
