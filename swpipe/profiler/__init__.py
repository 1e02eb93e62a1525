"""Exposed time: how much of a step's wall time each task really costs."""

from __future__ import annotations

from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import ProfileResult, ProfileResults

__all__ = ["ProfileResult", "ProfileResults", "TaskProfiler"]
