"""Ready-made plans for the tasks of ``swpipe.tasks.pipeline_parallel``, by name."""

from __future__ import annotations

from dataclasses import replace

from swpipe.core.plan import PipelinePlan
from swpipe.plans.prefetch import prefetch_plan

__all__ = ["PLANS", "ahead", "serial"]

LOAD = "load"
"""The task that moves a batch to the device."""

STEP = "step"
"""The task that runs the schedule; all ranks must submit its communication in the same order."""

UPDATE = "update"
"""The task that runs the optimizer's step."""

TASKS = (LOAD, STEP, UPDATE)


def serial() -> PipelinePlan:
    """Return the plan that runs all tasks serially on the caller's thread."""
    return _ordered(PipelinePlan.serial(TASKS))


def ahead(*, pull_group: str | None = "loader") -> PipelinePlan:
    """Return the plan that pulls and loads batches on other threads while the schedule runs.

    Args:
        pull_group: The name of the thread group that calls the loader; None for the caller's
            thread.
    """
    carried = [(STEP, UPDATE)]
    return _ordered(prefetch_plan([LOAD], [STEP, UPDATE], carried=carried, pull_group=pull_group))


def _ordered(plan: PipelinePlan) -> PipelinePlan:
    step = replace(plan.schedule[STEP], globally_ordered=True)
    return replace(plan, schedule={**plan.schedule, STEP: step})


PLANS = {"serial": serial, "ahead": ahead}
