"""A bar chart of times per task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swpipe.core.pictures import (
    COLORS,
    SMALL_SIZE,
    figure_of,
    save_figure,
    style_axes,
    svg_of,
)
from swpipe.profiler.spread import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_IN = 0.3
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
    height = 0.8 / len(series)  # of a bar, where a task has a height of 1
    # The figure grows with the number of bars, so that these have the same height in all charts.
    with figure_of(FRAME_IN + BAR_IN * len(series) * len(tasks), TITLE) as figure:
        axes = figure.subplots()
        style_axes(axes)
        for number, bars in enumerate(series):
            times = bars.times.values()
            drawn = axes.barh(
                [tasks.index(name) + number * height for name in bars.times],
                [1e3 * time.value_s for time in times],
                height,
                xerr=[1e3 * time.spread_s for time in times],
                color=COLORS[number % len(COLORS)],
                label=bars.label,
            )
            axes.bar_label(drawn, [time.text for time in times], padding=6, fontsize=SMALL_SIZE)
        middle = 0.4 - height / 2
        axes.set_yticks([place + middle for place in range(len(tasks))], tasks)
        axes.invert_yaxis()  # the first task on top
        axes.set_xlim(left=0)
        axes.legend(fontsize=SMALL_SIZE)
        yield figure
