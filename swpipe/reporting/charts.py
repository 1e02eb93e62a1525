"""The charts of a report as elements of its page: pictures, or text without matplotlib."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import replace

from swpipe._engine.program import SOURCES
from swpipe.profiler import ProfileResult
from swpipe.profiler.plot import Bars, bar_chart_svg
from swpipe.reporting.account import LOADER
from swpipe.trace import Trace, format_stacked, svg_stacked

SHOWN = 4
"""Iterations that a timeline shows."""


def exposed_chart(profile: ProfileResult) -> str:
    """Bars with intervals, of the tasks whose exposed times can be told apart from 0."""
    known = [name for name in profile.tasks if is_known(profile, name)]
    of, spread = (
        {shown_name(n): s[n] for n in known} for s in (profile.exposed_s, profile.spread_s)
    )
    try:
        return bar_chart_svg([Bars("", of, spread)], title=None) if known else ""
    except ModuleNotFoundError:
        return ""  # the table has the same figures


def shown_name(task: str) -> str:
    """What a page calls a task: a call of the loader is no task to its reader."""
    return LOADER if task in SOURCES else task


def is_known(profile: ProfileResult, name: str) -> bool:
    """Whether a task's exposed time can be told apart from 0."""
    exposed = profile.exposed(name)
    return exposed is not None and exposed.is_clear


def timeline_chart(traces: Mapping[str, Trace]) -> str:
    """Timelines below each other on one scale, each with its heading: ``Trace.steady(SHOWN)``."""
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
