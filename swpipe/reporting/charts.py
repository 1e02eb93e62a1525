"""The charts of a report as elements of its page: pictures, or text without matplotlib."""

from __future__ import annotations

import html
from collections.abc import Mapping

from swpipe.profiler import ProfileResult
from swpipe.profiler.plot import Bars, bar_chart_svg
from swpipe.trace import Trace, format_stacked, svg_stacked

SHOWN = 4
"""Iterations that a timeline shows."""


def exposed_chart(profile: ProfileResult) -> str:
    """Bars with intervals: what an iteration would save if a task cost nothing."""
    try:
        return bar_chart_svg([Bars("", profile.exposed_s, profile.spread_s)])
    except ModuleNotFoundError:
        return ""  # the table has the same figures


def timeline_chart(traces: Mapping[str, Trace]) -> str:
    """Timelines below each other on one scale, each with its heading: ``Trace.steady(SHOWN)``."""
    shown = {heading: trace.steady(SHOWN) for heading, trace in traces.items()}
    try:
        return svg_stacked(shown)
    except ModuleNotFoundError:
        return f"<pre>{html.escape(format_stacked(shown))}</pre>"
