"""Traces of what ran when: recording, statistics, Perfetto files, and pictures."""

from swpipe._engine.observers import Observer
from swpipe.trace.critical_path import CriticalPath, Link
from swpipe.trace.lanes import LaneTimes
from swpipe.trace.span import Row, Span
from swpipe.trace.trace import (
    OverRanks,
    TaskTimes,
    Trace,
    format_stacked,
    over_ranks,
    plot_stacked,
)

__all__ = [
    "CriticalPath",
    "LaneTimes",
    "Link",
    "Observer",
    "OverRanks",
    "Row",
    "Span",
    "TaskTimes",
    "Trace",
    "format_stacked",
    "over_ranks",
    "plot_stacked",
]
