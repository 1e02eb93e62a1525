"""Software pipelining for PyTorch: tasks say what to compute, plans how to overlap."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before all that asks to be called in a forked child, so that this is the one line to read.
if not hasattr(os, "register_at_fork"):
    raise ImportError(
        "swpipe needs a system whose processes can fork, such as Linux; on Windows, use it in WSL"
    )

from swpipe.core.context import IterContext, TypedContext
from swpipe.core.plan import HOST, PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask, task
from swpipe.pipeline import SWPipeline

if TYPE_CHECKING:
    from swpipe import loops as loops
    from swpipe import tuning as tuning
    from swpipe.loops import EvenData, ahead, feed, on_caller, overlap, through
    from swpipe.profiler import ProfileResult, TaskProfiler
    from swpipe.reporting import report
    from swpipe.tuning import autotune

__version__ = "0.1.0"

__all__ = [
    "HOST",
    "DeclaredIO",
    "EvenData",
    "IterContext",
    "PipelinePlan",
    "PipelineTask",
    "ProfileResult",
    "SWPipeline",
    "StreamSpec",
    "TaskProfiler",
    "TaskSchedule",
    "TypedContext",
    "ahead",
    "autotune",
    "feed",
    "on_caller",
    "overlap",
    "report",
    "task",
    "through",
]

_LATE = {
    "EvenData": "swpipe.loops",
    "ProfileResult": "swpipe.profiler",
    "TaskProfiler": "swpipe.profiler",
    "ahead": "swpipe.loops",
    "autotune": "swpipe.tuning",
    "feed": "swpipe.loops",
    "on_caller": "swpipe.loops",
    "overlap": "swpipe.loops",
    "report": "swpipe.reporting",
    "through": "swpipe.loops",
}

if not TYPE_CHECKING:  # which would take each name for Any

    def __getattr__(name: str) -> Any:
        """The names of the profiler, the planners and the loops, loaded when asked for."""
        if name in _LATE:
            return getattr(import_module(_LATE[name]), name)
        if name in ("loops", "tuning"):
            return import_module(f"swpipe.{name}")
        raise AttributeError(f"module 'swpipe' has no attribute {name!r}")
