"""Exposed time: how much of a step's wall time each task really costs; and what each task takes."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.profiler.advice import Advice
from swpipe.profiler.costing import measure_costs, with_resources
from swpipe.profiler.diff import Change, ProfileDiff
from swpipe.profiler.drop_ins import pipeline_breakdown
from swpipe.profiler.figures import Joint
from swpipe.profiler.memory_use import measure_memory
from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.slopes import Slope, Slopes, measure_slopes
from swpipe.profiler.trial import try_plans

__all__ = [
    "Advice",
    "Block",
    "Change",
    "CostModel",
    "Joint",
    "ProfileDiff",
    "ProfileResult",
    "ProfileResults",
    "Slope",
    "Slopes",
    "TaskCost",
    "TaskMemory",
    "TaskProfiler",
    "measure_costs",
    "measure_memory",
    "measure_slopes",
    "pipeline_breakdown",
    "try_plans",
    "with_resources",
]
