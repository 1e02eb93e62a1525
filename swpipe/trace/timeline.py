"""Timelines as a picture: one line per thread group and stream, one color per iteration.

    title
      io       [read 0][read 1]//[read 2]
      default  ///////[forward 0][forward 1]
               0 ms    10      20      30
                       iteration # 0 # 1 # 2   / waiting

In the axes x is in milliseconds and y in rows from the top. All panels share the time scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swpipe.core.pictures import (
    COLORS,
    FAINT,
    INK,
    LINE,
    SMALL_SIZE,
    figure_of,
    save_figure,
    style_axes,
    svg_of,
)
from swpipe.program import OWN
from swpipe.trace.span import Panel, Row, Span, extent_ns, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HATCHED: Any = {"facecolor": "white", "edgecolor": LINE, "hatch": "/////", "linewidth": 0}

MOST_ROWS = 100
MOST_SPANS = 5_000
"""The largest numbers of rows and spans in a picture."""

ROW_IN = 0.7
FRAME_IN = 0.9
BOX = 0.88
HEADING = 0.32
"""The height of a box, and of a heading, in rows."""

LETTER = 0.58
"""The approximate width of a letter, in font sizes."""


def plot(
    panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw timelines below each other; see ``Trace.plot``.

    Raises:
        ValueError: A timeline is empty, or they are too large for a picture.
    """
    with _drawn(panels, title) as figure:
        save_figure(figure, path)


def svg(panels: Sequence[Panel]) -> str:
    """Return timelines below each other as an ``<svg>`` element, for use in a page."""
    with _drawn(panels, None) as figure:
        return svg_of(figure)


@contextmanager
def _drawn(panels: Sequence[Panel], title: str | None) -> Iterator[Figure]:
    """Yield a figure with the timelines."""
    panels = [panel.from_zero() for panel in panels]
    tops, headings, end = _layout(panels)
    spans = sum(len(panel.spans) for panel in panels)
    if len(tops) > MOST_ROWS or spans > MOST_SPANS:
        raise ValueError(
            f"{len(tops)} rows and {spans} spans do not fit a picture, which has at most "
            f"{MOST_ROWS} rows and {MOST_SPANS} spans: draw some iterations of them (Trace.window)"
        )
    span_ms = max(1, *(extent_ns(panel.spans)[1] for panel in panels)) / 1e6
    # All panels share one pair of axes, which keeps their time scales equal.
    with figure_of(FRAME_IN + ROW_IN * end, title) as figure:
        axes = figure.subplots()
        style_axes(axes)
        # y grows downwards, so that the first panel is on top.
        axes.set(xlim=(0, span_ms), ylim=(end, 0))
        axes.set_yticks([top + BOX / 2 for top in tops.values()], [row.label for _, row in tops])
        for heading, top in headings:
            axes.text(0, top, heading, va="center", fontsize=SMALL_SIZE, color=FAINT)
        # How much text fits a box is known only once the layout is.
        figure.draw_without_rendering()
        ms_per_pt = span_ms / (axes.get_window_extent().width * 72 / figure.dpi)
        for number, panel in enumerate(panels):
            for row, on_row in panel.by_row().items():
                _draw_row(axes, tops[number, row], on_row, ms_per_pt)
        _draw_legend(figure, panels, ms_per_pt)
        yield figure


def _layout(
    panels: Sequence[Panel],
) -> tuple[dict[tuple[int, Row], float], list[tuple[str, float]], float]:
    """Return the tops of rows by panel and row, the middles of headings, and the end."""
    tops: dict[tuple[int, Row], float] = {}
    headings: list[tuple[str, float]] = []
    end = 0.0
    for number, panel in enumerate(panels):
        if panel.heading:
            headings.append((panel.heading, end + HEADING / 2))
            end += HEADING
        for row in rows_of(panel.spans):
            tops[number, row] = end
            end += 1
    return tops, headings, end


def _draw_row(axes: Axes, top: float, spans: Sequence[Span], ms_per_pt: float) -> None:
    """Draw waits, then the boxes with their text."""
    # swpipe's own tasks are drawn only if they are wide enough to be seen.
    spans = [s for s in spans if s.task not in OWN or s.duration_ns > 1e6 * ms_per_pt]
    waits = [((s.start_ns - s.wait_ns) / 1e6, s.wait_ns / 1e6) for s in spans]
    # Thinner hatching would look like a line.
    waits = [wait for wait in waits if wait[1] > 2 * ms_per_pt]
    axes.broken_barh(waits, (top + BOX / 4, BOX / 2), **HATCHED)
    bars = [(span.start_ns / 1e6, span.duration_ns / 1e6) for span in spans]
    # A white edge separates neighbours, but would cover a thin box.
    edges = [1.0 if width_ms > 4 * ms_per_pt else 0.0 for _, width_ms in bars]
    colors = [_color(span.iteration) for span in spans]
    axes.broken_barh(bars, (top, BOX), facecolors=colors, edgecolor="white", linewidths=edges)
    for span in spans:
        x_ms = (span.start_ns + span.end_ns) / 2e6
        room_pt = span.duration_ns / 1e6 / ms_per_pt
        text, upright = _text(span, room_pt)
        if text:
            axes.text(
                x_ms, top + BOX / 2, text, fontsize=SMALL_SIZE, color=INK, ha="center",
                va="center", rotation=90 if upright else 0,
            )  # fmt: skip


def _text(span: Span, room_pt: float) -> tuple[str, bool]:
    """Return the text for a box, and whether it is upright."""
    number = str(span.iteration)
    if _width_pt(span.task) <= room_pt:
        return f"{span.task}\n{number}", False
    # Upright text needs the width of one line, and has to fit the height of the box.
    if room_pt >= SMALL_SIZE:
        for text in (f"{span.task} {number}", span.task):
            if _width_pt(text) <= 72 * ROW_IN * BOX:
                return text, True
    return (number if _width_pt(number) <= room_pt else ""), False


def _width_pt(text: str) -> float:
    """Return the approximate width of a text, in points."""
    return LETTER * SMALL_SIZE * (len(text) + 0.5)


def _color(iteration: int) -> str:
    """Return the color of an iteration."""
    return COLORS[iteration % len(COLORS)]


def _draw_legend(figure: Figure, panels: Sequence[Panel], ms_per_pt: float) -> None:
    """Explain colors and hatching, below the axis on the right."""
    from matplotlib.patches import Patch

    spans = [span for panel in panels for span in panel.spans]
    iterations = sorted({span.iteration for span in spans})
    keys: list[Any] = []
    # With more iterations, a color stands for several of them, and a key would mislead.
    if len(iterations) <= len(COLORS):
        keys = [Patch(facecolor=_color(i), label=f"iteration {i}") for i in iterations]
    if any(span.wait_ns > 2e6 * ms_per_pt for span in spans):
        keys.append(Patch(label="waiting", **HATCHED))
    figure.legend(
        handles=keys, loc="outside lower right", ncols=len(keys) or 1, frameon=False,
        fontsize=SMALL_SIZE, labelcolor=FAINT, borderpad=0, handlelength=1.2,
    )  # fmt: skip
