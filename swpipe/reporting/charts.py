"""The timelines of a report as an element of its page: a picture, or text without matplotlib."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace

from swpipe.program import SOURCES
from swpipe.reporting.account import LOADER
from swpipe.trace import Trace, format_stacked, svg_stacked

SHOWN = 4
"""The number of iterations that a timeline shows."""


def shown_name(task: str) -> str:
    """Return the name of a task on the page, where a call of the loader is no task."""
    return LOADER if task in SOURCES else task


def timeline_chart(traces: Mapping[str, Trace]) -> str:
    """Return timelines one below the other on a common scale, each under its heading.

    They show the iterations ``Trace.steady(SHOWN)``.
    """
    # The first and last iterations fill and drain the pipeline, so only steady ones are shown.
    shown = {
        heading: Trace(
            replace(span, task=shown_name(span.task)) for span in trace.steady(SHOWN).spans
        )
        for heading, trace in traces.items()
    }
    try:
        return svg_stacked(shown)
    except ModuleNotFoundError:
        return f"<pre>{html.escape(format_stacked(shown))}</pre>"
