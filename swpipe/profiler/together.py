"""Which tasks to shortcut together: those that hide each other cost nothing one by one.

Under the plan, an iteration takes as long as the busiest thread group. Its tasks together say how
much shorter it gets until another group is the busiest; all tasks of all groups that are equally
busy, how much shorter it gets until a dependence or a less busy group sets the pace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from swpipe.core.messages import listed
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan

LIMITING = 0.9
"""A thread group that is busy for so much of an iteration may set its pace."""


def busy_s(plan: PipelinePlan, host_s: Mapping[str, float]) -> dict[str, float]:
    """Thread group to the seconds per iteration in which it runs tasks, or calls the loader."""
    busy: dict[str, float] = defaultdict(float)
    if PULL in host_s:
        busy[plan.pull_group or DEFAULT_GROUP] += host_s[PULL]
    for name, schedule in plan.schedule.items():
        busy[schedule.thread_group] += host_s[name]
    return dict(busy)


def limiting(busy: Mapping[str, float], step_s: float) -> tuple[str, ...]:
    """Thread groups that may set the pace; the busiest come first."""
    found = [group for group, seconds in busy.items() if seconds >= LIMITING * step_s]
    return tuple(sorted(found, key=lambda group: -busy[group]))


def joint_kinds(
    plan: PipelinePlan, names: Collection[str], host_s: Mapping[str, float], step_s: float
) -> dict[tuple[str, ...], str]:
    """Tasks to shortcut together, and what they have in common.

    Args:
        plan: The plan under which is measured.
        names: The tasks that are measured one by one, in serial order.
        host_s: Task to its time on its thread.
        step_s: The time of an iteration.
    """
    busy = busy_s(plan, host_s)
    busiest = max(busy, key=lambda group: busy[group])
    kinds = {}
    if len(busy) > 1:
        kinds[_on(plan, names, [busiest])] = f"the busiest thread group, {busiest}"
    pace = limiting(busy, step_s)
    if len(pace) > 1:
        kinds[_on(plan, names, pace)] = f"all groups that are busy all the time, {listed(pace)}"
    return {kind: what for kind, what in kinds.items() if len(kind) > 1}


def _on(plan: PipelinePlan, names: Collection[str], groups: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if plan.schedule[name].thread_group in groups)
