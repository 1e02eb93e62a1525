"""Exposed time: how much of a step's wall time each task really costs; and what each task takes."""

from __future__ import annotations

from swpipe.core.costs import CostModel, TaskCost
from swpipe.profiler.advice import Advice
from swpipe.profiler.costing import measure_costs, with_resources
from swpipe.profiler.diff import Change, ProfileDiff
from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import Joint, ProfileResult, ProfileResults
from swpipe.profiler.trial import try_plans

__all__ = [
    "Advice",
    "Change",
    "CostModel",
    "Joint",
    "ProfileDiff",
    "ProfileResult",
    "ProfileResults",
    "TaskCost",
    "TaskProfiler",
    "measure_costs",
    "try_plans",
    "with_resources",
]
