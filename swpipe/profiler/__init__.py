"""Profiles: how much of a step's wall time each task costs, and what each task takes itself."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.profiler.costing import measure_costs, with_resources
from swpipe.profiler.diff import ProfileDiff, TimeChange
from swpipe.profiler.figures import (
    Advice,
    IterationTimes,
    Measurement,
    RankTimes,
    TaskFigures,
)
from swpipe.profiler.host import ThreadTimes
from swpipe.profiler.memory_use import measure_memory
from swpipe.profiler.profiler import TaskProfiler, pipeline_breakdown
from swpipe.profiler.rank_differences import RankDifferences
from swpipe.profiler.result import ProfileResult, ProfileResults

__all__ = [
    "Advice",
    "Block",
    "CostModel",
    "IterationTimes",
    "Measurement",
    "ProfileDiff",
    "ProfileResult",
    "ProfileResults",
    "RankDifferences",
    "RankTimes",
    "TaskCost",
    "TaskFigures",
    "TaskMemory",
    "TaskProfiler",
    "ThreadTimes",
    "TimeChange",
    "measure_costs",
    "measure_memory",
    "pipeline_breakdown",
    "with_resources",
]
