"""Schedules of tasks with lookaheads and slots, which become plans and run on ``SWPipeline``."""

from swpipe.schedulable.declared_task import SameProgressSync, SameProgressSyncSide, Task
from swpipe.schedulable.executors import SequentialExecutor, ThreadedExecutor
from swpipe.schedulable.schedulable_pipeline import Pipeline, SchedulablePipeline
from swpipe.schedulable.schedule import Schedule, Stage
from swpipe.schedulable.schedule_rules import (
    ScheduleValidationError,
    SchedulingError,
    topological_sort,
    validate,
)
from swpipe.schedulable.slot_context import DataSlot, TaskContext
from swpipe.schedulable.stream_pool import StreamPool

__all__ = [
    "DataSlot",
    "Pipeline",
    "SameProgressSync",
    "SameProgressSyncSide",
    "SchedulablePipeline",
    "Schedule",
    "ScheduleValidationError",
    "SchedulingError",
    "SequentialExecutor",
    "Stage",
    "StreamPool",
    "Task",
    "TaskContext",
    "ThreadedExecutor",
    "topological_sort",
    "validate",
]
