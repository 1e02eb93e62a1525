"""Pictures by matplotlib: their style, and pictures as files or elements of a page."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swpipe.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "light" scheme: cells with black text, distinguishable with any kind of color blindness
# (SRON technical note SRON/EPS/TN/09-002).
COLORS = ("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#BBCC33")
INK = "#222222"
FAINT = "#777777"
LINE = "#C4C4C4"
GRID = "#EEEEEE"
ROW_SIZE = 10.0
SMALL_SIZE = 8.0
"""Font sizes in points."""

WIDTH_IN = 10.0
DPI = 200


@contextmanager
def figure_of(height_in: float, title: str | None) -> Iterator[Figure]:
    """Make a figure with a title, to be drawn and saved within the block.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'swpipe[plot]'", name=error.name
        ) from error
    style: Any = {"hatch.linewidth": 0.7, "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(style):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
        yield figure


def style_axes(axes: Axes) -> None:
    """Set the style of axes: rows with names on the left, milliseconds on a faint axis below."""
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(axis="y", length=0, labelsize=ROW_SIZE, labelcolor=INK)
    axes.tick_params(axis="x", length=3, labelsize=SMALL_SIZE, color=LINE, labelcolor=FAINT)
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}" if ms else "0 ms")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure; the suffix of ``path`` selects the format."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, facecolor="white")


def svg_of(figure: Figure) -> str:
    """Return the ``<svg>`` element of a figure, with text as text, at most as wide as the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    element = text.getvalue().partition("<svg")[2]  # without the XML header of a file
    return f'<svg style="max-width: 100%; height: auto"{element}'
