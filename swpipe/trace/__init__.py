"""Traces of what ran when: recording, statistics, Perfetto files, and pictures."""

from swpipe.trace.span import Row, Span
from swpipe.trace.trace import TaskTimes, Trace, format_stacked, plot_stacked

__all__ = ["Row", "Span", "TaskTimes", "Trace", "format_stacked", "plot_stacked"]
