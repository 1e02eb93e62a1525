"""Profiles: how much of a step's wall time each task costs, and what each task takes itself."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.profiler.costing import measure_costs, with_resources
from swpipe.profiler.diff import ProfileDiff, TimeChange
from swpipe.profiler.figures import Advice
from swpipe.profiler.memory_use import measure_memory
from swpipe.profiler.profiler import TaskProfiler, pipeline_breakdown
from swpipe.profiler.rank_differences import RankDifferences, gather_differences
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.trial import try_plans

__all__ = [
    "Advice",
    "Block",
    "CostModel",
    "ProfileDiff",
    "ProfileResult",
    "ProfileResults",
    "RankDifferences",
    "TaskCost",
    "TaskMemory",
    "TaskProfiler",
    "TimeChange",
    "gather_differences",
    "measure_costs",
    "measure_memory",
    "pipeline_breakdown",
    "try_plans",
    "with_resources",
]
