"""Software pipelining for PyTorch: tasks say what to compute, plans how to overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swpipe._engine.observers import Observer
from swpipe.core.context import IterContext
from swpipe.core.errors import InternalError, PlanError, StallError
from swpipe.core.plan import PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.pipeline import SWPipeline
from swpipe.report import RunReport
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.profiler import ProfileResult, TaskProfiler

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
    "StallError",
    "StreamSpec",
    "TaskProfiler",
    "TaskSchedule",
    "Trace",
]

_FROM_PROFILER = ("ProfileResult", "TaskProfiler")


def __getattr__(name: str) -> Any:
    """The profiler's names, loaded when asked for: the framework imports none of its rooms."""
    if name in _FROM_PROFILER:
        from swpipe import profiler

        return getattr(profiler, name)
    raise AttributeError(f"module 'swpipe' has no attribute {name!r}")
