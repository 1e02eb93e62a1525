"""Software pipelining for PyTorch: tasks say what to compute, plans how to overlap."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swpipe._engine.observers import Observer
from swpipe.core.context import IterContext, TypedContext
from swpipe.core.errors import (
    InternalError,
    PlanError,
    ShortcutError,
    StallError,
    UnsavedStateError,
)
from swpipe.core.plan import PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask, task
from swpipe.pipeline import SWPipeline
from swpipe.report import RunReport
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.profiler import ProfileResult, TaskProfiler
    from swpipe.tuning.accelerate_loader import AccelerateLoader
    from swpipe.tuning.autotuning import autotune
    from swpipe.tuning.overlapping import overlap
    from swpipe.tuning.resumable import ResumableLoop

__version__ = "0.1.0"

__all__ = [
    "AccelerateLoader",
    "DeclaredIO",
    "InternalError",
    "IterContext",
    "Observer",
    "PipelinePlan",
    "PipelineTask",
    "PlanError",
    "ProfileResult",
    "ResumableLoop",
    "RunReport",
    "SWPipeline",
    "ShortcutError",
    "StallError",
    "StreamSpec",
    "TaskProfiler",
    "TaskSchedule",
    "Trace",
    "TypedContext",
    "UnsavedStateError",
    "autotune",
    "overlap",
    "task",
]

_LATE = {
    "AccelerateLoader": "swpipe.tuning.accelerate_loader",
    "ProfileResult": "swpipe.profiler",
    "ResumableLoop": "swpipe.tuning.resumable",
    "TaskProfiler": "swpipe.profiler",
    "autotune": "swpipe.tuning.autotuning",
    "overlap": "swpipe.tuning.overlapping",
}


def __getattr__(name: str) -> Any:
    """The names of the profiler and the planners, loaded when asked for."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'swpipe' has no attribute {name!r}")
