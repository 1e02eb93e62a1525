"""Traces of which task ran when: recording, statistics, Perfetto files, and pictures."""

from swpipe._engine.observers import Observer
from swpipe.trace.bytes_in_flight import Holding, PeakMemory
from swpipe.trace.critical_path import CriticalPath, Link
from swpipe.trace.lanes import LaneTimes
from swpipe.trace.span import Row, Span
from swpipe.trace.step_times import StepTimes
from swpipe.trace.trace import (
    TaskTimes,
    Trace,
    format_stacked,
    plot_stacked,
    svg_stacked,
)

__all__ = [
    "CriticalPath",
    "Holding",
    "LaneTimes",
    "Link",
    "Observer",
    "PeakMemory",
    "Row",
    "Span",
    "StepTimes",
    "TaskTimes",
    "Trace",
    "format_stacked",
    "plot_stacked",
    "svg_stacked",
]
