"""Click logs in the Criteo TSV format: generated from a known model, read and decoded.

A line has a label (0 or 1), 13 integers and 26 hexadecimal ids. A missing value is empty.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Polars runs at the same time as torch: each gets one core.
os.environ.setdefault("POLARS_MAX_THREADS", "1")
import polars as pl

LABEL = "label"
INTEGERS = [f"I{k}" for k in range(1, 14)]
IDS = [f"C{k}" for k in range(1, 27)]
COLUMNS = [LABEL, *INTEGERS, *IDS]

VALUES = 2000
"""The number of different values that a generated id has."""


class Lines(NamedTuple):
    """The place of one batch in a log: reading it is a task, and not the iterator's work."""

    path: Path
    offset: int
    size: int


def generate(path: Path, rows: int, seed: int = 0) -> Path:
    """Write a log in which the click depends on the ids, and return its path.

    Ids follow Zipf's law, as in real logs: a few values are frequent, and most are rare.
    """
    draws = np.random.default_rng(seed)
    weights = draws.normal(0.0, 0.6, (len(IDS), VALUES + 1))
    ids = np.minimum(draws.zipf(1.3, (rows, len(IDS))), VALUES)
    logits = weights[np.arange(len(IDS)), ids].sum(1) - 1.0
    clicked = draws.random(rows) < 1 / (1 + np.exp(-logits))
    counts = draws.geometric(0.05, (rows, len(INTEGERS)))
    words = np.array([f"{k:08x}" for k in range(VALUES + 1)])[ids]
    missing = draws.random(words.shape) < 0.05
    columns: dict[str, object] = {LABEL: clicked.astype(np.int8)}
    columns |= {name: counts[:, k] for k, name in enumerate(INTEGERS)}
    columns |= {name: np.where(missing[:, k], "", words[:, k]) for k, name in enumerate(IDS)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(columns).write_csv(path, include_header=False, separator="\t", quote_style="never")
    return path


def batches_of(path: Path, rows: int) -> list[Lines]:
    """Return the places of a log's batches, of ``rows`` lines each."""
    ends = np.flatnonzero(np.fromfile(path, dtype=np.uint8) == ord("\n")) + 1
    edges = [0, *ends[rows - 1 :: rows].tolist()]
    if edges[-1] != ends[-1]:
        edges.append(int(ends[-1]))
    return [Lines(path, begin, end - begin) for begin, end in pairwise(edges)]


def read(lines: Lines) -> bytes:
    """Return the bytes of a batch."""
    with lines.path.open("rb") as log:
        log.seek(lines.offset)
        return log.read(lines.size)


def decode(data: bytes) -> tuple[pl.DataFrame, int]:
    """Return the rows with a label, in typed columns, and the number of rows without.

    Another value that does not parse counts as missing, which is null.
    """
    text = pl.read_csv(
        data,
        has_header=False,
        separator="\t",
        quote_char=None,
        schema=dict.fromkeys(COLUMNS, pl.String),
        truncate_ragged_lines=True,
        encoding="utf8-lossy",
    )
    label = pl.col(LABEL).replace_strict({"0": 0, "1": 1}, default=None, return_dtype=pl.Float32)
    typed = text.select(
        label,
        pl.col(INTEGERS).cast(pl.Float32, strict=False),
        pl.col(IDS).str.to_integer(base=16, dtype=pl.UInt64, strict=False),
    )
    good = typed.drop_nulls(LABEL)
    return good, typed.height - good.height
