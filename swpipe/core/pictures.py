"""The look of pictures, and a picture as an element of a page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

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
TITLE_SIZE, ROW_SIZE, SMALL_SIZE = 12.0, 10.0, 8.0
"""Font sizes in points."""


def style_axes(axes: Axes) -> None:
    """Rows with names on the left, and a faint axis below."""
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(axis="y", length=0, labelsize=ROW_SIZE, labelcolor=INK)
    axes.tick_params(axis="x", length=3, labelsize=SMALL_SIZE, color=LINE, labelcolor=FAINT)
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}" if ms else "0 ms")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def svg_of(figure: Figure) -> str:
    """The ``<svg>`` element of a figure, with its text as text, as wide as the page at most."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    element = text.getvalue().partition("<svg")[2]  # before it stands what only files have
    return f'<svg style="max-width: 100%; height: auto"{element}'
