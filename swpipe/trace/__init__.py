"""Who ran when: recording, figures, Perfetto JSON, and pictures for files and terminals."""

from swpipe.trace.span import Row, Span
from swpipe.trace.trace import TaskTimes, Trace

__all__ = ["Row", "Span", "TaskTimes", "Trace"]
