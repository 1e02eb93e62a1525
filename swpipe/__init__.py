"""Software pipelining for PyTorch: tasks define the computation, plans define the overlap."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before the imports that register functions for a forked child, so that this message comes first.
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

# These names are loaded when they are first used: their modules take a large part of the import
# time, and a plain pipeline needs none of them.
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

# For type checkers, ``__getattr__`` would give each name the type Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load a name of the profiler, the planners or the loops when it is first used."""
        if name in _LATE:
            return getattr(import_module(_LATE[name]), name)
        # Packages that ``import swpipe`` alone makes available as attributes.
        if name in ("loops", "tuning"):
            return import_module(f"swpipe.{name}")
        raise AttributeError(f"module 'swpipe' has no attribute {name!r}")
