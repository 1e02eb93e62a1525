"""A timeline drawn as a picture: a row per thread group and stream, a colour per iteration.

    title                                       iteration # 0 # 1 # 2   / waiting
      io       [read 0][read 1]//[read 2]
      default  ///////[forward 0][forward 1]
               0      10      20      30     ms

All measures are in points (1/72 inch), so that type and boxes look the same for any number of rows;
within the axes x is in milliseconds and y in points from the top. Several timelines may stand one
above the other in one picture, a *panel* each: each begins at 0, and all share the scale.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from swpipe.trace.span import OWN, Row, Span, extent_ns, from_zero, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "light" scheme: fills for cells with black text in them, which stay apart in every kind
# of colour blindness (SRON technical note SRON/EPS/TN/09-002).
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#BBCC33")
BESIDE = "#E6E6E6"
WAIT = "#C4C4C4"
INK = "#222222"
FAINT = "#777777"
GRID = "#EEEEEE"
HATCHED: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": WAIT,
    "hatch": "/////",
    "linewidth": 0,
}

WIDTH_PT = 720.0
DPI = 200
ROW_PT, GAP_PT, HEADING_PT = 30.0, 6.0, 16.0
TOP_PT, BOTTOM_PT, PAD_PT, MARGIN_PT = 28.0, 24.0, 10.0, 6.0
TITLE_SIZE, ROW_SIZE, SMALL_SIZE = 12.0, 10.0, 8.0
NAME_SIZES = (8.5, 7.5)
"""Sizes in which a task's name may stand in its box, the best first."""
HEADINGS = {"thread": "thread groups", "stream": "streams"}


class Panel(NamedTuple):
    """One timeline of a picture.

    Attributes:
        heading: A line above it; none where empty.
        spans: What to draw, measured or predicted.
        beside: What ran in the same time and matters less: drawn in grey.
    """

    heading: str
    spans: Sequence[Span]
    beside: Sequence[Span] = ()

    def moved(self) -> Self:
        """The panel with its first start at 0."""
        spans, beside = from_zero(self.spans, self.beside)
        return self._replace(spans=spans, beside=beside)


def plot(
    panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw timelines into a picture, one above the other.

    Args:
        panels: What to draw, from the top.
        path: The file to write; its suffix says the format: .png, .svg, .pdf.
        title: A line above it.

    Raises:
        ValueError: A panel has no span.
        ImportError: matplotlib is not installed.
    """
    panels = [panel.moved() for panel in panels]
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ImportError(
            "a picture needs matplotlib, which is not installed: pip install 'swpipe[plot]'"
        ) from error
    with rc_context({"hatch.linewidth": 0.7, "svg.fonttype": "none"}):
        picture = _Picture(panels)
        for at in picture.tops_pt:
            panel = panels[at.panel]
            picture.draw_row(
                at,
                [span for span in panel.spans if span.row == at.row],
                [span for span in panel.beside if span.row == at.row],
            )
        picture.draw_legend(
            [span for panel in panels for span in panel.spans],
            [span for panel in panels for span in panel.beside],
        )
        picture.save(path, title)


class _At(NamedTuple):
    """A row of a picture: which panel, from 0, and which of its rows."""

    panel: int
    row: Row


class _Picture:
    """A figure under way."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.tops_pt, headings, rows_pt = _stack(panels)
        left_pt = 2 * PAD_PT + max(_text_pt(at.row.name, ROW_SIZE) for at in self.tops_pt)
        inner_pt = WIDTH_PT - left_pt - 2 * PAD_PT
        self.height_pt = TOP_PT + rows_pt + BOTTOM_PT
        self.span_ms = max(1, *(extent_ns(panel.spans)[1] for panel in panels)) / 1e6
        self.ms_per_pt = self.span_ms / inner_pt
        self.figure = Figure(figsize=(WIDTH_PT / 72, self.height_pt / 72))
        FigureCanvasAgg(self.figure)
        self.axes: Axes = self.figure.add_axes(
            (
                left_pt / WIDTH_PT,
                BOTTOM_PT / self.height_pt,
                inner_pt / WIDTH_PT,
                rows_pt / self.height_pt,
            )
        )
        self.axes.set_xlim(0, self.span_ms)
        self.axes.set_ylim(rows_pt, 0)
        self._dress_axes()
        for heading, middle_pt in headings:
            self.axes.text(0, middle_pt, heading, va="center", fontsize=SMALL_SIZE, color=FAINT)

    def _dress_axes(self) -> None:
        axes = self.axes
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(WAIT)
        axes.set_yticks(
            [top_pt + ROW_PT / 2 for top_pt in self.tops_pt.values()],
            [at.row.name for at in self.tops_pt],
            fontsize=ROW_SIZE,
            color=INK,
        )
        axes.tick_params(axis="y", length=0, pad=PAD_PT / 2)
        axes.tick_params(axis="x", length=3, labelsize=SMALL_SIZE, color=WAIT, labelcolor=FAINT)
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}" if ms else "0 ms")
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)

    def draw_row(self, at: _At, spans: Sequence[Span], beside: Sequence[Span]) -> None:
        """Draw what a row did: waiting, then what is beside, then the boxes and what they hold."""
        top_pt = self.tops_pt[at]
        # swpipe's own turns count where they take time; else they are specks between the boxes.
        spans = [s for s in spans if s.task not in OWN or s.duration_ns > 1e6 * self.ms_per_pt]
        waits = [((s.start_ns - s.wait_ns) / 1e6, s.wait_ns / 1e6) for s in spans]
        waits = [wait for wait in waits if wait[1] > 2 * self.ms_per_pt]
        thinner = (top_pt + ROW_PT / 4, ROW_PT / 2)
        self.axes.broken_barh(waits, thinner, **HATCHED)
        self._boxes(beside, top_pt, [BESIDE] * len(beside))
        self._boxes(spans, top_pt, [_colour(span.iteration) for span in spans])
        sizes = self._name_sizes(spans)
        for span in spans:
            self._write(span, top_pt, sizes[span.task])

    def _boxes(self, spans: Sequence[Span], top_pt: float, colours: Sequence[str]) -> None:
        bars = [(span.start_ns / 1e6, span.duration_ns / 1e6) for span in spans]
        # A white edge sets neighbours apart; it would swallow a box as thin as itself.
        edges = [1.0 if width_ms > 4 * self.ms_per_pt else 0.0 for _, width_ms in bars]
        self.axes.broken_barh(
            bars, (top_pt, ROW_PT), facecolors=colours, edgecolor="white", linewidths=edges
        )

    def _name_sizes(self, spans: Sequence[Span]) -> dict[str, float]:
        """Each task's size of type: one that fits most of its boxes, so that they look alike."""
        rooms_pt: dict[str, list[float]] = defaultdict(list)
        for span in spans:
            rooms_pt[span.task].append(self._room_pt(span))
        return {
            task: next(
                (s for s in NAME_SIZES if _text_pt(task, s) <= _narrow(rooms)), NAME_SIZES[-1]
            )
            for task, rooms in rooms_pt.items()
        }

    def _room_pt(self, span: Span) -> float:
        return span.duration_ns / 1e6 / self.ms_per_pt - MARGIN_PT

    def _write(self, span: Span, top_pt: float, name_size: float) -> None:
        room_pt = self._room_pt(span)
        number = str(span.iteration)
        if room_pt < _text_pt(number, SMALL_SIZE):
            return
        lines = [(0.5, number, SMALL_SIZE)]
        if _text_pt(span.task, name_size) <= room_pt:
            lines = [(0.36, span.task, name_size), (0.72, number, SMALL_SIZE)]
        for depth, text, size in lines:
            self.axes.text(
                (span.start_ns + span.end_ns) / 2e6,
                top_pt + depth * ROW_PT,
                text,
                fontsize=size,
                color=INK,
                ha="center",
                va="center_baseline",
            )

    def draw_legend(self, spans: Sequence[Span], beside: Sequence[Span]) -> None:
        """Tell what colours and hatching mean, above the rows at the right."""
        from matplotlib.patches import Patch

        iterations = sorted({span.iteration for span in spans})
        keys: list[Any] = []
        if len(iterations) <= len(COLOURS):
            keys = [Patch(facecolor=_colour(i), label=f"iteration {i}") for i in iterations]
        if any(span.wait_ns > 2e6 * self.ms_per_pt for span in spans):
            keys.append(Patch(label="waiting", **HATCHED))
        if beside:
            keys.append(Patch(facecolor=BESIDE, label="other iterations"))
        self.figure.legend(
            handles=keys,
            loc="center right",
            bbox_to_anchor=(1 - 2 * PAD_PT / WIDTH_PT, 1 - TOP_PT / 2 / self.height_pt),
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

    def save(self, path: str | os.PathLike[str], title: str | None) -> None:
        if title:
            self.figure.text(
                PAD_PT / WIDTH_PT,
                1 - TOP_PT / 2 / self.height_pt,
                title,
                va="center",
                fontsize=TITLE_SIZE,
                color=INK,
            )
        self.figure.savefig(path, dpi=DPI, facecolor="white")


class _Stack(NamedTuple):
    """Where rows begin, headings with their middles, and the end; in points from the top."""

    tops_pt: dict[_At, float]
    headings_pt: list[tuple[str, float]]
    end_pt: float


def _stack(panels: Sequence[Panel]) -> _Stack:
    """Rows one below the other; in a panel with both kinds of row, each kind has a heading."""
    tops_pt: dict[_At, float] = {}
    headings_pt: list[tuple[str, float]] = []
    end_pt = 0.0
    for number, panel in enumerate(panels):
        rows = rows_of(panel.spans)
        headed = len({row.kind for row in rows}) > 1
        above = panel.heading
        for kind, members in groupby(rows, key=lambda row: row.kind):
            parts = [part for part in (above, HEADINGS[kind] if headed else "") if part]
            if parts:
                headings_pt.append((", ".join(parts), end_pt + HEADING_PT / 2))
                end_pt += HEADING_PT
            above = ""
            for row in members:
                tops_pt[_At(number, row)] = end_pt
                end_pt += ROW_PT + GAP_PT
    return _Stack(tops_pt, headings_pt, end_pt)


def _narrow(rooms_pt: list[float]) -> float:
    """What three of four rooms have."""
    return sorted(rooms_pt)[len(rooms_pt) // 4]


def _colour(iteration: int) -> str:
    return COLOURS[iteration % len(COLOURS)]


@cache
def _text_pt(text: str, size: float) -> float:
    """How wide ``text`` is."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=size).get_extents().width)
