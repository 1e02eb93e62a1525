"""Draw timelines with characters, for a terminal.

    io       ▌read 0████▌read 1▓▓▓▓░░░░░░▌read 2████
    default  ░░░░░░░░░░░▌train 0██████▌train 1▓▓▓▓▓▓
             0 ms       10         20         30

A cell shows what its row did for most of the cell's time; much shorter spans are not visible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from swpipe.trace.span import Panel, Row, Span, extent_ns, in_order, rows_of

START, FILLS, WAIT, BESIDE, IDLE = "▌", "█▓", "░", "·", " "
GAP = "  "
MIN_CELLS = 20
MIN_NAME = 2
"""Task names are shortened to no fewer letters than this."""
MIN_TICK_CELLS = 8
"""Least distance between two ticks of the time axis."""


class _Scale(NamedTuple):
    cell_ns: float
    cells: int

    def cell(self, time_ns: int) -> int:
        return min(self.cells - 1, max(0, int(time_ns / self.cell_ns)))


class _Item(NamedTuple):
    """What a cell may show. If two cover it equally, the later one is shown."""

    sign: str
    span: Span | None = None


def label(row: Row) -> str:
    """The printed name of a row."""
    return row.name if row.kind == "thread" else f"stream {row.name}"


def chart(panels: Sequence[Panel], width: int = 100) -> str:
    """Draw timelines below each other, each from 0, on one scale; see ``format_stacked``."""
    panels = [panel.from_zero() for panel in panels]
    margin = max(len(label(row)) for panel in panels for row in rows_of(panel.spans))
    cells = width - margin - len(GAP)
    if cells < MIN_CELLS:
        least = width - cells + MIN_CELLS
        raise ValueError(f"width {width} is too narrow: these rows need {least} columns")
    length_ns = max(extent_ns(panel.spans)[1] for panel in panels)
    scale = _Scale(max(1, length_ns) / cells, cells)
    lines: list[str] = []
    for panel in panels:
        lines += [panel.heading] if panel.heading else []
        for row, on_row in panel.by_row().items():
            lines.append(label(row).ljust(margin) + GAP + _line(*on_row, scale))
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
    best, best_ns = _Item(IDLE), cell_ns - sum(cover.values())
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
    if room >= MIN_NAME + len(number):
        text = task[: room - len(number)] + number
    else:
        text = number.strip() if room >= len(number) - 1 else ""
    return START + text.ljust(room, FILLS[iteration % len(FILLS)])


def _axis(scale: _Scale) -> str:
    """Ticks at round milliseconds; the first one has the unit."""
    ms_per_cell = scale.cell_ns / 1e6
    least = MIN_TICK_CELLS * ms_per_cell
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
