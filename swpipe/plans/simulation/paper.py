"""Plans on paper: names, and no tasks yet."""

from __future__ import annotations

import torch

from swpipe.plan import PipelinePlan, TaskSchedule
from swpipe.task import PipelineTask
from swpipe.verify import check


def check_on_paper(plan: PipelinePlan) -> None:
    """Refuse a plan that cannot be compiled; its tasks need not be at hand.

    Raises:
        PlanError: Lists all that is wrong, with the period x task grid.
    """
    # A torch.Stream belongs to some device; on paper any will do.
    entries = (e for e in plan.schedule.values() if isinstance(e, TaskSchedule))
    streams = (e.stream for e in entries if isinstance(e.stream, torch.Stream))
    device_type = next((stream.device.type for stream in streams), "cpu")
    tasks = plan.tasks or [PipelineTask(name, _nothing) for name in plan.schedule]
    check(plan, tasks, device_type)


def _nothing(ctx: object) -> None:
    return None
