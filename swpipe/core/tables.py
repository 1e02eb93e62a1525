"""Tables as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

WIDTH = 80
"""The width of a terminal, in characters."""


def wrapped(text: str) -> str:
    """Return text in lines that fit a terminal; continued lines are indented by two more."""
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
    """Return rows as a table in plain text.

    Args:
        headers: One title for each column.
        rows: The cells of each row, as they are to be shown.
        left: The indices of the columns that are aligned left; numbers are aligned right.
    """
    from tabulate import tabulate

    # disable_numparse, since tabulate would print "1e5" or "007", as a task may be called, anew.
    sides = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate([*rows], headers=[*headers], disable_numparse=True, colalign=sides)
