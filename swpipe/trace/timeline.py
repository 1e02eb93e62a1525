"""Draw timelines as a picture: one line per thread group and stream, one color per iteration.

    title
                                                iteration # 0 # 1 # 2   / waiting
      io       [read 0][read 1]//[read 2]
      default  ///////[forward 0][forward 1]
               0      10      20      30     ms

Lengths are in points (1/72 inch), so that text and boxes look the same for any number of rows. In
the axes x is in milliseconds and y in points from the top. All panels share the time scale.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from swpipe._engine.program import OWN
from swpipe.core.files import replacing
from swpipe.core.pictures import (
    COLORS,
    FAINT,
    INK,
    LINE,
    ROW_SIZE,
    SMALL_SIZE,
    TITLE_SIZE,
    style_axes,
    svg_of,
)
from swpipe.trace.span import Panel, Row, Span, extent_ns, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BESIDE = "#E6E6E6"
HATCHED: Any = {"facecolor": "white", "edgecolor": LINE, "hatch": "/////", "linewidth": 0}

MOST_ROWS, MOST_SPANS = 100, 5_000
"""The largest picture."""

WIDTH_PT = 720.0
DPI = 200
ROW_PT, GAP_PT, HEADING_PT = 44.0, 6.0, 16.0
TITLE_PT, TOP_PT, BOTTOM_PT, PAD_PT, MARGIN_PT = 22.0, 28.0, 24.0, 10.0, 6.0
NAME_SIZES = (8.5, 7.5)
"""Font sizes of a task's name in its box, the preferred one first."""
HEADINGS = {"thread": "thread groups", "stream": "streams"}


def plot(
    panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw timelines below each other; see ``Trace.plot``.

    Raises:
        ValueError: A timeline is empty, or they are too large for a picture.
    """
    with _drawn(panels, title) as figure, replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, facecolor="white")


def svg(panels: Sequence[Panel], *, title: str | None = None) -> str:
    """The same as an ``<svg>`` element, to be put into a page.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A timeline is empty, or they are too large for a picture.
    """
    with _drawn(panels, title) as figure:
        return svg_of(figure)


@contextmanager
def _drawn(panels: Sequence[Panel], title: str | None) -> Iterator[Figure]:
    panels = [panel.from_zero() for panel in panels]
    rows = sum(len(rows_of(panel.spans)) for panel in panels)
    spans = sum(len(panel.spans) + len(panel.beside) for panel in panels)
    if rows > MOST_ROWS or spans > MOST_SPANS:
        raise ValueError(
            f"{rows} rows and {spans} spans do not fit a picture, which has at most {MOST_ROWS} "
            f"rows and {MOST_SPANS} spans: draw some iterations of them (Trace.window)"
        )
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ImportError(
            "a picture needs matplotlib, which is not installed: pip install 'swpipe[plot]'"
        ) from error
    style: Any = {"hatch.linewidth": 0.7, "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(style):
        picture = _Picture(panels, title)
        for number, panel in enumerate(panels):
            for row, on_row in panel.by_row().items():
                picture.draw_row(picture.tops_pt[number, row], *on_row)
        picture.draw_legend(panels)
        yield picture.figure


class _Picture:
    """A matplotlib figure with empty axes for the panels."""

    def __init__(self, panels: Sequence[Panel], title: str | None) -> None:
        from matplotlib.figure import Figure

        self.tops_pt, headings, rows_pt = _layout(panels)
        left_pt = 2 * PAD_PT + max(_text_pt(row.name, ROW_SIZE) for _, row in self.tops_pt)
        inner_pt = WIDTH_PT - left_pt - 2 * PAD_PT
        title_pt = TITLE_PT if title else 0.0
        height_pt = title_pt + TOP_PT + rows_pt + BOTTOM_PT
        self.legend_middle = 1 - (title_pt + TOP_PT / 2) / height_pt
        span_ms = max(1, *(extent_ns(panel.spans)[1] for panel in panels)) / 1e6
        self.ms_per_pt = span_ms / inner_pt
        self.figure = Figure(figsize=(WIDTH_PT / 72, height_pt / 72))
        w, h = WIDTH_PT, height_pt
        place = (left_pt / w, BOTTOM_PT / h, inner_pt / w, rows_pt / h)
        self.axes: Axes = self.figure.add_axes(place, xlim=(0, span_ms), ylim=(rows_pt, 0))
        self._style_axes()
        if title:
            top = (PAD_PT / w, 1 - PAD_PT / h)
            self.figure.text(*top, title, va="top", fontsize=TITLE_SIZE, color=INK)
        for heading, middle_pt in headings:
            self.axes.text(0, middle_pt, heading, va="center", fontsize=SMALL_SIZE, color=FAINT)

    def _style_axes(self) -> None:
        style_axes(self.axes)
        middles_pt = [top_pt + ROW_PT / 2 for top_pt in self.tops_pt.values()]
        self.axes.set_yticks(middles_pt, [row.name for _, row in self.tops_pt])
        self.axes.tick_params(axis="y", pad=PAD_PT / 2)

    def draw_row(self, top_pt: float, spans: Sequence[Span], beside: Sequence[Span]) -> None:
        """Draw waits, then the spans beside, then the boxes with their text."""
        # swpipe's own tasks are drawn only if they are wide enough to be seen.
        spans = [s for s in spans if s.task not in OWN or s.duration_ns > 1e6 * self.ms_per_pt]
        waits = [((s.start_ns - s.wait_ns) / 1e6, s.wait_ns / 1e6) for s in spans]
        waits = [wait for wait in waits if wait[1] > 2 * self.ms_per_pt]
        self.axes.broken_barh(waits, (top_pt + ROW_PT / 4, ROW_PT / 2), **HATCHED)
        self._draw_boxes(beside, top_pt, [BESIDE] * len(beside))
        self._draw_boxes(spans, top_pt, [_color(span.iteration) for span in spans])
        rooms_pt: dict[str, list[float]] = defaultdict(list)
        for span in spans:
            rooms_pt[span.task].append(self._room_pt(span))
        sizes = {task: _name_size(task, rooms) for task, rooms in rooms_pt.items()}
        for span in spans:
            self._write(span, top_pt, sizes[span.task])

    def _draw_boxes(self, spans: Sequence[Span], top_pt: float, colors: Sequence[str]) -> None:
        bars = [(span.start_ns / 1e6, span.duration_ns / 1e6) for span in spans]
        # A white edge separates neighbours, but would cover a thin box.
        edges = [1.0 if width_ms > 4 * self.ms_per_pt else 0.0 for _, width_ms in bars]
        self.axes.broken_barh(
            bars, (top_pt, ROW_PT), facecolors=colors, edgecolor="white", linewidths=edges
        )

    def _room_pt(self, span: Span) -> float:
        return span.duration_ns / 1e6 / self.ms_per_pt - MARGIN_PT

    def _write(self, span: Span, top_pt: float, name_size: float) -> None:
        """The task above the iteration; in a narrow box upright, or only one of the two."""
        room_pt, small = self._room_pt(span), NAME_SIZES[-1]
        number = str(span.iteration)
        upright = [
            text for text in (f"{span.task} {number}", span.task) if _fits(text, small, ROW_PT)
        ]
        lines: list[tuple[float, str, float]] = []
        style: dict[str, Any] = {"color": INK, "ha": "center", "va": "center_baseline"}
        if _fits(span.task, name_size, room_pt):
            lines = [(0.36, span.task, name_size), (0.70, number, SMALL_SIZE)]
        elif upright and small <= room_pt + MARGIN_PT / 2:
            lines = [(0.5, upright[0], small)]
            style |= {"rotation": 90, "va": "center"}
        elif _fits(number, SMALL_SIZE, room_pt):
            lines = [(0.5, number, SMALL_SIZE)]
        x_ms = (span.start_ns + span.end_ns) / 2e6
        for depth, text, size in lines:
            self.axes.text(x_ms, top_pt + depth * ROW_PT, text, fontsize=size, **style)

    def draw_legend(self, panels: Sequence[Panel]) -> None:
        """Explain colors and hatching, above the rows on the right."""
        from matplotlib.patches import Patch

        spans = [span for panel in panels for span in panel.spans]
        iterations = sorted({span.iteration for span in spans})
        keys: list[Any] = []
        if len(iterations) <= len(COLORS):
            keys = [Patch(facecolor=_color(i), label=f"iteration {i}") for i in iterations]
        if any(span.wait_ns > 2e6 * self.ms_per_pt for span in spans):
            keys.append(Patch(label="waiting", **HATCHED))
        if any(panel.beside for panel in panels):
            keys.append(Patch(facecolor=BESIDE, label="other iterations"))
        self.figure.legend(
            handles=keys,
            loc="center right",
            bbox_to_anchor=(1 - 2 * PAD_PT / WIDTH_PT, self.legend_middle),
            borderaxespad=0,
            borderpad=0,
            ncols=len(keys) or 1,
            frameon=False,
            fontsize=SMALL_SIZE,
            labelcolor=FAINT,
            handlelength=1.2,
            handleheight=1.0,
            handletextpad=0.5,
            columnspacing=1.2,
        )


class _Layout(NamedTuple):
    """Tops of rows by panel and row, middles of headings, and the end; in points from the top."""

    tops_pt: dict[tuple[int, Row], float]
    headings_pt: list[tuple[str, float]]
    end_pt: float


def _layout(panels: Sequence[Panel]) -> _Layout:
    """Stack the rows. In a panel with both kinds of rows, each kind has a heading."""
    tops_pt: dict[tuple[int, Row], float] = {}
    headings_pt: list[tuple[str, float]] = []
    end_pt = 0.0
    for number, panel in enumerate(panels):
        rows = rows_of(panel.spans)
        both = len({row.kind for row in rows}) > 1
        above = panel.heading
        for kind, members in groupby(rows, key=lambda row: row.kind):
            heading = ", ".join(filter(None, (above, HEADINGS[kind] if both else "")))
            if heading:
                headings_pt.append((heading, end_pt + HEADING_PT / 2))
                end_pt += HEADING_PT
            above = ""
            for row in members:
                tops_pt[number, row] = end_pt
                end_pt += ROW_PT + GAP_PT
    return _Layout(tops_pt, headings_pt, end_pt)


def _name_size(task: str, rooms_pt: list[float]) -> float:
    """One font size for all boxes of a task: the first that fits in three of four boxes."""
    room_pt = sorted(rooms_pt)[len(rooms_pt) // 4]
    return next((s for s in NAME_SIZES if _fits(task, s, room_pt)), NAME_SIZES[-1])


def _color(iteration: int) -> str:
    return COLORS[iteration % len(COLORS)]


def _fits(text: str, size: float, room_pt: float) -> bool:
    return _text_pt(text, size) <= room_pt


@cache
def _text_pt(text: str, size: float) -> float:
    """The width of ``text``."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=size).get_extents().width)
