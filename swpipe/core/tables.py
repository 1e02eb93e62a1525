"""Tables as text: plain, or drawn with lines and fitted to the terminal that they go to."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

IN_BOXES: ContextVar[bool] = ContextVar("IN_BOXES", default=False)
"""Whether tables are for a terminal; the command line says so."""


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Collection[int] = (0,)
) -> str:
    """A table.

    Args:
        headers: One for each column.
        rows: Their cells, as they are to be shown.
        left: The columns that begin on the left; numbers end on the right.
    """
    sides = ["left" if column in left else "right" for column in range(len(headers))]
    if IN_BOXES.get():
        return _in_boxes(headers, rows, sides)
    from tabulate import tabulate

    return tabulate([*rows], headers=[*headers], disable_numparse=True, colalign=sides)


def _in_boxes(headers: Sequence[str], rows: Iterable[Sequence[Any]], sides: list[Any]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.ROUNDED, header_style="")
    for header, side in zip(headers, sides, strict=True):
        drawn.add_column(Text(header), justify=side)
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=io.StringIO(), color_system=None, width=Console().width)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n")
