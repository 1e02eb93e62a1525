"""Pipeline-parallel schedules: planning, checks, and charts.

A schedule orders the passes of a model's stages on several ranks. A ``PipelinePlan``, in contrast,
orders the tasks of one process.
"""

from swpipe.plans.pipeline_parallel.action import Action, Communication, Pair, ScheduleError
from swpipe.plans.pipeline_parallel.collective_placement import place_collectives
from swpipe.plans.pipeline_parallel.order_check import TimedAction
from swpipe.plans.pipeline_parallel.pipeline_costs import (
    ActivationMemory,
    PipelineCosts,
    activation_memory,
)
from swpipe.plans.pipeline_parallel.pipeline_graph import PipelineGraph, ScheduledNode
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import ScheduleReport, check_schedule
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_planner import VPlan, plan_v_schedule

__all__ = [
    "Action",
    "ActivationMemory",
    "Communication",
    "Pair",
    "PipelineCosts",
    "PipelineGraph",
    "PipelineSchedule",
    "ScheduleError",
    "ScheduleReport",
    "ScheduledNode",
    "TimedAction",
    "VPlan",
    "activation_memory",
    "check_schedule",
    "place_collectives",
    "plan_v_schedule",
    "torch_schedule",
]
