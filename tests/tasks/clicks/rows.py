"""Rows of click logs, written by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from swpipe.tasks.clicks.config import ModelConfig

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))
"""A model of few parameters."""


def row(fields: Mapping[int, str] | None = None) -> str:
    """A row whose fields are its label 0, 13 integers 1 and 26 ids ``a``, but for those given.

    Args:
        fields: Position to text: 0 is the label, 1 to 13 the integers, 14 to 39 the ids.
    """
    texts = ["0"] + ["1"] * 13 + ["a"] * 26
    for position, text in (fields or {}).items():
        texts[position] = text
    return "\t".join(texts)


def lines(*rows: str) -> bytes:
    """The rows as a file has them."""
    return "".join(f"{text}\n" for text in rows).encode()


def varied_row(draw: random.Random) -> str:
    """A good row of random values, some of them missing."""
    label = str(draw.randrange(2))
    integers = [draw.choice(["", str(draw.randrange(-2, 500))]) for _ in range(13)]
    ids = [draw.choice(["", f"{draw.randrange(40) * 0x9E3779B1 % 2**32:08x}"]) for _ in range(26)]
    return "\t".join([label, *integers, *ids])


def write_log(path: Path, rows: int, seed: int = 0) -> Path:
    """A file of good rows of random values."""
    draw = random.Random(seed)
    path.write_bytes(lines(*(varied_row(draw) for _ in range(rows))))
    return path
