"""Tables as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

WIDTH = 80
"""Of a terminal, in characters."""


def wrapped(text: str) -> str:
    """Lines that fit a terminal; those that go on are indented as the first, and by two more."""
    return "\n".join(
        textwrap.fill(
            line,
            WIDTH,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Collection[int] = (0,)
) -> str:
    """A table.

    Args:
        headers: One for each column.
        rows: Their cells, as they are to be shown.
        left: The columns that begin on the left; numbers end on the right.
    """
    from tabulate import tabulate

    sides = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate([*rows], headers=[*headers], disable_numparse=True, colalign=sides)
