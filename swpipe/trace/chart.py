"""Timelines in characters, for a terminal.

    io       ▌read 0████▌read 1▓▓▓▓░░░░░░▌read 2████
    default  ░░░░░░░░░░░▌train 0██████▌train 1▓▓▓▓▓▓
             0 ms       10         20         30

A cell shows what its row did in the middle of the cell's time; shorter spans may not be visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from swpipe.trace.span import Panel, Span, extent_ns, in_order, rows_of

START = "▌"
FILLS = "█▓"
WAIT = "░"
BESIDE = "·"
IDLE = " "
GAP = "  "
MIN_CELLS = 20
MIN_NAME = 2
"""The least number of letters to which task names are shortened."""
MIN_TICK_CELLS = 8
"""The least distance between two ticks of the time axis, in cells."""


class _Item(NamedTuple):
    """The content of a cell: a sign, and the span that begins with it, if any."""

    sign: str
    span: Span | None = None


def chart(panels: Sequence[Panel], width: int = 100) -> str:
    """Draw timelines below each other, each from 0, on one scale; see ``format_stacked``.

    Raises:
        ValueError: ``width`` is too narrow for the rows.
    """
    panels = [panel.from_zero() for panel in panels]
    # All panels have one margin and one scale, so that their times can be compared.
    margin = max(len(row.label) for panel in panels for row in rows_of(panel.spans))
    cells = width - margin - len(GAP)
    if cells < MIN_CELLS:
        least = width - cells + MIN_CELLS
        raise ValueError(f"width {width} is too narrow: these rows need {least} columns")
    cell_ns = max(1, *(extent_ns(panel.spans)[1] for panel in panels)) / cells
    lines: list[str] = []
    for panel in panels:
        lines += [panel.heading] if panel.heading else []
        for row, on_row in panel.by_row().items():
            lines.append(row.label.ljust(margin) + GAP + _line(*on_row, cells, cell_ns))
    lines.append(" " * margin + GAP + _axis(cells, cell_ns / 1e6))
    return "\n".join(line.rstrip() for line in lines)


def _line(spans: Sequence[Span], beside: Sequence[Span], cells: int, cell_ns: float) -> str:
    """Return the characters of one row."""
    pieces = [(s.start_ns, s.end_ns, _Item(BESIDE)) for s in in_order(beside)]
    for span in in_order(spans):
        pieces.append((span.start_ns - span.wait_ns, span.start_ns, _Item(WAIT)))
        pieces.append((span.start_ns, span.end_ns, _Item(START, span)))
    shown = []
    for cell in range(cells):
        middle_ns = (cell + 0.5) * cell_ns
        # The last item counts: a task, rather than the wait before it.
        items = [item for start_ns, end_ns, item in pieces if start_ns <= middle_ns < end_ns]
        shown.append(items[-1] if items else _Item(IDLE))
    return "".join(_box(item, len(list(run))) for item, run in groupby(shown))


def _box(item: _Item, cells: int) -> str:
    """Return the characters of one box: name and number, or the number, or neither."""
    if item.span is None:
        return item.sign * cells
    room = cells - len(START)
    number = str(item.span.iteration)
    text = number if room >= len(number) else ""
    if room > MIN_NAME + len(number):
        text = f"{item.span.task[: room - len(number) - 1]} {number}"
    # Neighbouring iterations alternate between two fills.
    return START + text.ljust(room, FILLS[item.span.iteration % len(FILLS)])


def _axis(cells: int, cell_ms: float) -> str:
    """Return ticks at round milliseconds; the first one has the unit."""
    least = MIN_TICK_CELLS * cell_ms
    # The largest power of ten that is not wider than the least distance of two ticks.
    power = 10.0 ** math.floor(math.log10(least))
    # 1, 2 or 5 times a power of ten: the first distance that is wide enough.
    step_ms = next(power * n for n in (1, 2, 5, 10) if n == 10 or power * n >= least)
    places = max(0, -math.floor(math.log10(step_ms)))
    line = "0 ms"
    for tick in range(1, int(cells * cell_ms / step_ms) + 1):
        mark = f"{tick * step_ms:.{places}f}"
        at = round(tick * step_ms / cell_ms)
        # A tick at the right edge may have no room for its figure.
        if at + len(mark) <= cells:
            line = line.ljust(at) + mark
    return line
