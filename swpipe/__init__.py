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
    from swpipe.loops.overlapping import overlap
    from swpipe.profiler import ProfileResult, TaskProfiler
    from swpipe.tuning.autotuning import autotune

__version__ = "0.1.0"

__all__ = [
    "DeclaredIO",
    "InternalError",
    "IterContext",
    "Observer",
    "PipelinePlan",
    "PipelineTask",
    "PlanError",
    "ProfileResult",
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
    "ProfileResult": "swpipe.profiler",
    "TaskProfiler": "swpipe.profiler",
    "autotune": "swpipe.tuning.autotuning",
    "overlap": "swpipe.loops.overlapping",
}


def __getattr__(name: str) -> Any:
    """The names of the rooms, and the rooms for loops, loaded when asked for."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name in ("loops", "tuning"):
        return import_module(f"swpipe.{name}")
    raise AttributeError(f"module 'swpipe' has no attribute {name!r}")
