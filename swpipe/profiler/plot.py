"""Results as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swpipe.profiler.result import ProfileResult


def bar_chart(results: Sequence[ProfileResult], path: str | Path) -> None:
    """Draw one group of horizontal bars per task, one bar per result, with error bars.

    Args:
        results: At least one.
        path: The file to write; its ending tells the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: No results.
    """
    if not results:
        raise ValueError("there is nothing to draw: no batches were profiled")
    try:
        from matplotlib.figure import Figure  # no pyplot: no global state, no display
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: install it with pip install 'swpipe[plot]'", name=error.name
        ) from error

    tasks = list(dict.fromkeys(name for result in results for name in result.tasks))
    height = 0.8 / len(results)
    figure = Figure(figsize=(8, 1.4 + 0.45 * len(tasks) * max(1.0, 0.6 * len(results))))
    axes = figure.subplots()
    for index, result in enumerate(results):
        exposed_ms = [1e3 * result.exposed_s.get(name, 0.0) for name in tasks]
        spread_ms = [1e3 * result.spread_s.get(name, 0.0) for name in tasks]
        axes.barh(
            [place + (index - (len(results) - 1) / 2) * height for place in range(len(tasks))],
            exposed_ms,
            height=0.9 * height,
            # Exposed time is never negative, so neither is the lower end of its bar.
            xerr=[[min(e, s) for e, s in zip(exposed_ms, spread_ms, strict=True)], spread_ms],
            error_kw={"elinewidth": 1, "capsize": 2},
            label=f"{result.batch}, {result.mode}: {1e3 * result.baseline_s:.1f} ms per iteration",
        )
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()  # the first task on top
    axes.set_xlim(left=0)
    axes.set_xlabel("exposed time, ms per iteration")
    axes.set_title("Wall time saved if the task cost nothing", fontsize="medium")
    axes.legend(loc="best", fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
