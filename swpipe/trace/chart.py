"""Timelines in characters, for a terminal.

    io       ▌read 0████▌read 1▓▓▓▓░░░░░░▌read 2████
    default  ░░░░░░░░░░░▌train 0██████▌train 1▓▓▓▓▓▓
             0 ms                          34.000 ms

A cell shows what its row did in the middle of the cell's time; shorter spans may not be visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swpipe.core.messages import in_ms
from swpipe.trace.span import Panel, Span, extent_ns, in_order, rows_of

START = "▌"
FILLS = "█▓"
WAIT = "░"
IDLE = " "
GAP = "  "
MIN_CELLS = 20
MIN_NAME = 2
"""The least number of letters to which task names are shortened."""


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
    end_ns = max(1, *(extent_ns(panel.spans)[1] for panel in panels))
    lines: list[str] = []
    for panel in panels:
        lines += [panel.heading] if panel.heading else []
        for row, on_row in panel.by_row().items():
            lines.append(row.label.ljust(margin) + GAP + _line(on_row, cells, end_ns / cells))
    zero = " " * margin + GAP + "0 ms"
    lines.append(zero + in_ms(end_ns / 1e3).rjust(width - len(zero)))
    return "\n".join(line.rstrip() for line in lines)


def _line(spans: Sequence[Span], cells: int, cell_ns: float) -> str:
    """Return the characters of one row."""
    line = [IDLE] * cells
    for span in in_order(spans):
        # A cell belongs to a span if its middle does.
        wait, start, end = (
            max(0, math.ceil(at_ns / cell_ns - 0.5))
            for at_ns in (span.start_ns - span.wait_ns, span.start_ns, span.end_ns)
        )
        line[wait:start] = WAIT * (start - wait)
        line[start:end] = _box(span, end - start)
    return "".join(line)


def _box(span: Span, cells: int) -> str:
    """Return the characters of one box: name and number, or the number, or neither."""
    room = cells - len(START)
    number = str(span.iteration)
    text = number if room >= len(number) else ""
    if room > MIN_NAME + len(number):
        text = f"{span.task[: room - len(number) - 1]} {number}"
    # Neighbouring iterations alternate between two fills. A box without a cell has no edge either.
    return (START + text.ljust(room, FILLS[span.iteration % len(FILLS)]))[:cells]
