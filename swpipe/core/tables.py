"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


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
