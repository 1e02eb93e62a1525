"""Ready-made plans of pipeline-parallel training (``swpipe.tasks.pipeline_parallel``), by name."""

from __future__ import annotations

from dataclasses import replace

from swpipe.core.plan import PipelinePlan
from swpipe.plans.prefetch import prefetch_plan

__all__ = ["PLANS", "ahead", "serial"]

LOAD = "load"
"""Brings a batch to the device."""

STEP = "step"
"""Runs the schedule; its sends and receives must come in one order on all ranks."""

UPDATE = "update"
"""The optimizer's step."""

TASKS = (LOAD, STEP, UPDATE)


def serial() -> PipelinePlan:
    """One task after the other on the caller's thread."""
    return _ordered(PipelinePlan.serial(TASKS))


def ahead(*, pull_group: str | None = "loader") -> PipelinePlan:
    """The next batches are pulled and loaded on other threads while the schedule runs on this one.

    Args:
        pull_group: Name of the thread group that calls the loader; None for the caller's thread.
    """
    carried = [(STEP, UPDATE)]
    return _ordered(prefetch_plan([LOAD], [STEP, UPDATE], carried=carried, pull_group=pull_group))


def _ordered(plan: PipelinePlan) -> PipelinePlan:
    step = replace(plan.schedule[STEP], globally_ordered=True)
    return replace(plan, schedule={**plan.schedule, STEP: step})


PLANS = {"serial": serial, "ahead": ahead}
