"""Exposed time: how much of a step's wall time each task really costs; and what each task takes."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.profiler.advice import Advice
from swpipe.profiler.costing import measure_costs, with_resources
from swpipe.profiler.diff import Change, ProfileDiff
from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import Joint, ProfileResult, ProfileResults
from swpipe.profiler.slopes import Slope, Slopes, measure_slopes
from swpipe.profiler.trial import try_plans

__all__ = [
    "Advice",
    "Change",
    "CostModel",
    "Joint",
    "ProfileDiff",
    "ProfileResult",
    "ProfileResults",
    "Slope",
    "Slopes",
    "TaskCost",
    "TaskProfiler",
    "measure_costs",
    "measure_slopes",
    "try_plans",
    "with_resources",
]
