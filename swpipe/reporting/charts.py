"""The timeline of a report as an element of its page."""

from __future__ import annotations

from dataclasses import replace

from swpipe.program import SOURCES
from swpipe.reporting.account import LOADER
from swpipe.trace import Trace
from swpipe.trace.trace import html_of

SHOWN = 4
"""The number of iterations that a timeline shows."""


def shown_name(task: str) -> str:
    """Return the name of a task on the page, where a call of the loader is no task."""
    return LOADER if task in SOURCES else task


def timeline_chart(trace: Trace) -> str:
    """Return the timeline of the iterations ``Trace.steady(SHOWN)``."""
    # The first and last iterations fill and drain the pipeline, so only steady ones are shown.
    named = Trace(replace(span, task=shown_name(span.task)) for span in trace.spans)
    return html_of(named.steady(SHOWN))
