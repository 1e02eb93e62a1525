"""A bar chart of times per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swpipe.core.files import replacing


class Bars(NamedTuple):
    """The bars of one color: by task, their lengths and the half-widths of their error bars."""

    label: str
    value_s: Mapping[str, float]
    error_s: Mapping[str, float]


def bar_chart(series: Sequence[Bars], path: str | Path) -> None:
    """Draw one group of horizontal bars per task; the suffix of ``path`` selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``series`` is empty.
    """
    if not series:
        raise ValueError("there is nothing to draw: no batches were profiled")
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: install it with pip install 'swpipe[plot]'", name=error.name
        ) from error

    tasks = list(dict.fromkeys(name for bars in series for name in bars.value_s))
    height = 0.8 / len(series)
    figure = Figure(figsize=(8, 1.4 + 0.45 * len(tasks) * max(1.0, 0.6 * len(series))))
    axes = figure.subplots()
    for index, (label, value_s, error_s) in enumerate(series):
        value_ms = [1e3 * value_s.get(name, 0.0) for name in tasks]
        error_ms = [1e3 * error_s.get(name, 0.0) for name in tasks]
        offset = (index - (len(series) - 1) / 2) * height
        axes.barh(
            [place + offset for place in range(len(tasks))],
            value_ms,
            height=0.9 * height,
            # Exposed time is never negative, so the error bar does not go below 0.
            xerr=[list(map(min, value_ms, error_ms)), error_ms],
            error_kw={"elinewidth": 1, "capsize": 2},
            label=label,
        )
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()  # the first task on top
    axes.set_xlim(left=0)
    axes.set_xlabel("exposed time, ms per iteration")
    axes.set_title("Wall time saved if the task cost nothing", fontsize="medium")
    axes.legend(loc="best", fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
