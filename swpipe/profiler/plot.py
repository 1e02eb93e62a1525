"""A bar chart of times per task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swpipe.core.pictures import (
    COLORS,
    FAINT,
    GRID,
    INK,
    LINE,
    SMALL_SIZE,
    figure_of,
    save_figure,
    style_axes,
    svg_of,
)
from swpipe.profiler.spread import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_IN = 0.24
ROW_GAP_IN = 0.14
FRAME_IN = 1.1
TITLE = "Exposed time: what an iteration would save if the task cost nothing"


class Bars(NamedTuple):
    """The bars of one color, with error bars: task to its time."""

    label: str
    times: Mapping[str, Estimate]


def bar_chart(series: Sequence[Bars], path: str | Path) -> None:
    """Draw one group of horizontal bars per task; the suffix of ``path`` selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``series`` is empty.
    """
    with _drawn(series) as figure:
        save_figure(figure, path)


def bar_chart_svg(series: Sequence[Bars]) -> str:
    """Return the bar chart of ``bar_chart`` as an ``<svg>`` element."""
    with _drawn(series) as figure:
        return svg_of(figure)


@contextmanager
def _drawn(series: Sequence[Bars]) -> Iterator[Figure]:
    if not series:
        raise ValueError("there is nothing to draw: no batches were profiled")
    # Tasks are united over all series, in the order of their first appearance.
    tasks = list(dict.fromkeys(name for bars in series for name in bars.times))
    row_in = BAR_IN * len(series) + ROW_GAP_IN
    # The figure grows with the number of tasks, so that bars have the same height in all charts.
    with figure_of(FRAME_IN + row_in * len(tasks), TITLE) as figure:
        # matplotlib is optional, so it is imported only when something is drawn.
        from matplotlib.patches import Patch

        axes = figure.subplots()
        style_axes(axes)
        for index, bars in enumerate(series):
            # Within a task's row, each series has a bar of its own height below the one before.
            places = {name: k * row_in + (index + 0.5) * BAR_IN for k, name in enumerate(tasks)}
            _draw_bars(axes, bars, places, COLORS[index % len(COLORS)])
        middle_in = BAR_IN * len(series) / 2
        axes.set_yticks([place * row_in + middle_in for place in range(len(tasks))], tasks)
        axes.invert_yaxis()  # the first task on top
        axes.set_xlim(left=0)
        axes.margins(x=0.15)
        axes.legend(
            handles=[
                Patch(color=COLORS[index % len(COLORS)], label=bars.label)
                for index, bars in enumerate(series)
            ],
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderpad=0,
            ncols=len(series),
            frameon=False,
            fontsize=SMALL_SIZE,
            labelcolor=FAINT,
        )
        yield figure


def _draw_bars(axes: Axes, bars: Bars, places: Mapping[str, float], color: str) -> None:
    """Draw the bars of one color with their intervals; bars not distinct from 0 are grey."""
    times = [*bars.times.values()]
    drawn = axes.barh(
        [places[name] for name in bars.times],
        [1e3 * time.value_s for time in times],
        height=0.86 * BAR_IN,
        color=[color if time.is_clear else GRID for time in times],
        edgecolor=[color if time.is_clear else LINE for time in times],
        # Exposed time is never negative, so the error bar does not go below 0.
        xerr=[
            [1e3 * min(time.value_s, time.spread_s) for time in times],
            [1e3 * time.spread_s for time in times],
        ],
        error_kw={"elinewidth": 1, "capsize": 2.5, "ecolor": FAINT},
    )
    texts = [time.text for time in times]
    axes.bar_label(drawn, texts, padding=6, fontsize=SMALL_SIZE, color=INK)
