"""A timeline drawn with characters, for a terminal.

    io       ▌read 0████▌read 1▓▓▓▓░░░░░░▌read 2████
    default  ░░░░░░░░░░░▌train 0██████▌train 1▓▓▓▓▓▓
             0 ms       10         20         30

A cell shows what its row did for most of the cell's time: much shorter turns are not seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from swpipe.trace.span import Row, Span, extent_ns, from_zero, in_order, rows_of

START, FILLS, WAIT, BESIDE, IDLE = "▌", "█▓", "░", "·", " "
GAP = "  "
FEWEST_CELLS = 20
SHORTEST_NAME = 2
"""Least letters of a task's name that are worth printing."""
TICK_CELLS = 8
"""Least distance between two marks of the time axis."""


class _Scale(NamedTuple):
    cell_ns: float
    cells: int

    def cell(self, time_ns: int) -> int:
        return min(self.cells - 1, max(0, int(time_ns / self.cell_ns)))


class _Item(NamedTuple):
    """What a cell may show; the later of two that cover it equally wins."""

    sign: str
    span: Span | None = None


_IDLE = _Item(IDLE)


def label(row: Row) -> str:
    """How a row is called in print."""
    return row.name if row.kind == "thread" else f"stream {row.name}"


def chart(spans: Sequence[Span], width: int = 100, *, beside: Sequence[Span] = ()) -> str:
    """Draw spans, one line per row, over a time axis in milliseconds.

    Args:
        spans: What to draw, measured or predicted.
        width: Columns that a line may have.
        beside: What ran in the same time and matters less.

    Raises:
        ValueError: There is no span, or ``width`` leaves no room.
    """
    return charts([("", spans, beside)], width)


def charts(panels: Sequence[tuple[str, Sequence[Span], Sequence[Span]]], width: int = 100) -> str:
    """Draw timelines one above the other, each from 0 on, all to the same scale.

    Args:
        panels: Of each its heading ("" for none), its spans, and what is beside.
        width: Columns that a line may have.

    Raises:
        ValueError: A panel has no span, or ``width`` leaves no room.
    """
    moved = [(heading, *from_zero(spans, beside)) for heading, spans, beside in panels]
    margin = max(len(label(row)) for _, spans, _ in moved for row in rows_of(spans))
    cells = width - margin - len(GAP)
    if cells < FEWEST_CELLS:
        least = width - cells + FEWEST_CELLS
        raise ValueError(f"width {width} is too narrow: these rows need {least} columns")
    length_ns = max(extent_ns(spans)[1] for _, spans, _ in moved)
    scale = _Scale(max(1, length_ns) / cells, cells)
    lines: list[str] = []
    for heading, spans, beside in moved:
        if heading:
            lines.append(heading)
        for row in rows_of(spans):
            line = _line(
                [span for span in spans if span.row == row],
                [span for span in beside if span.row == row],
                scale,
            )
            lines.append(label(row).ljust(margin) + GAP + line)
    lines.append(" " * margin + GAP + _axis(scale))
    return "\n".join(line.rstrip() for line in lines)


def _line(spans: Iterable[Span], beside: Iterable[Span], scale: _Scale) -> str:
    covers: list[dict[_Item, float]] = [defaultdict(float) for _ in range(scale.cells)]
    for span in in_order(beside):
        _cover(covers, scale, span.start_ns, span.end_ns, _Item(BESIDE))
    for span in in_order(spans):
        _cover(covers, scale, span.start_ns - span.wait_ns, span.start_ns, _Item(WAIT))
        _cover(covers, scale, span.start_ns, span.end_ns, _Item(START, span))
    shown = [_most(cover, scale.cell_ns) for cover in covers]
    return "".join(_box(item, len(list(run))) for item, run in groupby(shown))


def _cover(
    covers: list[dict[_Item, float]], scale: _Scale, start_ns: int, end_ns: int, item: _Item
) -> None:
    for cell in range(scale.cell(start_ns), scale.cell(end_ns) + 1):
        from_ns = cell * scale.cell_ns
        shared_ns = min(end_ns, from_ns + scale.cell_ns) - max(start_ns, from_ns)
        if shared_ns > 0:
            covers[cell][item] += shared_ns


def _most(cover: dict[_Item, float], cell_ns: float) -> _Item:
    best, best_ns = _IDLE, cell_ns - sum(cover.values())
    for item, covered_ns in cover.items():
        if covered_ns >= best_ns:
            best, best_ns = item, covered_ns
    return best


def _box(item: _Item, cells: int) -> str:
    if item.span is None:
        return item.sign * cells
    task, iteration = item.span.task, item.span.iteration
    room = cells - len(START)
    number = f" {iteration}"
    if room >= SHORTEST_NAME + len(number):
        text = task[: room - len(number)] + number
    else:
        text = number.strip() if room >= len(number) - 1 else ""
    return START + text.ljust(room, FILLS[iteration % len(FILLS)])


def _axis(scale: _Scale) -> str:
    """Marks at round milliseconds; the first names the unit."""
    ms_per_cell = scale.cell_ns / 1e6
    least = TICK_CELLS * ms_per_cell
    power = 10.0 ** math.floor(math.log10(least))
    step_ms = next((power * n for n in (1, 2, 5) if power * n >= least), 10 * power)
    places = max(0, -math.floor(math.log10(step_ms)))
    line = "0 ms"
    for tick in range(1, int(scale.cells * ms_per_cell / step_ms) + 1):
        mark = f"{tick * step_ms:.{places}f}"
        at = round(tick * step_ms / ms_per_cell)
        if at + len(mark) <= scale.cells:
            line = line.ljust(at) + mark
    return line
