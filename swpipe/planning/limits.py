"""Limits on the plans that a planner may return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swpipe.core.messages import listed, shown
from swpipe.core.plan import MOST_ITERATIONS as _MOST
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, TaskRef, names_of
from swpipe.errors import PlanError, Problem


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """Limits on the plans that a planner may return.

    Attributes:
        in_flight: The most iterations in flight, 1 to 1,000; each holds a batch in memory.
        groups: The most thread groups, including the caller's; 1 to 1,000.
        workers: The most threads of one group; 1 to 1,000. The cost model does not know which tasks
            wait and which compute: for tasks that compute, more workers than cores gain nothing.
        frozen: Names of tasks that must be in the last stage, on the caller's thread, and on their
            present stream; for example the training tasks, so that nothing is stale.
        max_bytes: The most bytes that a plan may hold, by the simulator; None for no limit. The
            costs must have the tasks' memory.

    Raises:
        PlanError: A number is not an integer from 1 to 1,000, ``max_bytes`` is not an integer of 1
            or more, or ``frozen`` has an entry that is neither a task nor a name.
    """

    in_flight: int
    groups: int
    frozen: tuple[str, ...]
    workers: int
    max_bytes: int | None

    def __init__(
        self,
        in_flight: int = 5,
        groups: int = 4,
        frozen: Iterable[TaskRef] = (),
        workers: int = 8,
        max_bytes: int | None = None,
    ) -> None:
        # A single name is meant as one task, not as an iterable of letters.
        refs = (frozen,) if isinstance(frozen, str) else tuple(frozen)
        counts = {"in_flight": in_flight, "groups": groups, "workers": workers}
        # All problems are collected and raised at once, so that the user mends them in one go.
        problems = [
            Problem(f"the limit {name} is {shown(value)}: give an integer from 1 to {_MOST}")
            for name, value in counts.items()
            # ``type`` and not ``isinstance``: True is not a number of threads.
            if type(value) is not int or not 1 <= value <= _MOST
        ]
        problems += [
            Problem(f"frozen has {shown(ref)}, which is neither a task nor a task's name")
            for ref in refs
            if not isinstance(ref, str | PipelineTask)
        ]
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            rule = "give a number of bytes, 1 or more"
            problems.append(Problem(f"max_bytes is {shown(max_bytes)}: {rule}"))
        if problems:
            raise PlanError(problems)
        # The dataclass is frozen, so its fields are set past its own ``__setattr__``. It has its
        # own ``__init__`` because ``frozen`` accepts tasks and stores names.
        for name, value in {**counts, "frozen": names_of(refs), "max_bytes": max_bytes}.items():
            object.__setattr__(self, name, value)

    def allow(self, plan: PipelinePlan) -> bool:
        """Return whether a plan keeps the limits on iterations in flight, groups and workers."""
        return (
            plan.depth <= self.in_flight
            and len(plan.thread_groups) <= self.groups
            and plan.most_workers <= self.workers
        )

    def check(self, plan: PipelinePlan) -> None:
        """Raise PlanError if the limits freeze tasks that the plan does not have."""
        if unknown := [name for name in self.frozen if name not in plan.schedule]:
            rule = f"which the plan does not have (it has: {listed(plan.schedule)})"
            mend = "correct the name, or leave it out of frozen"
            raise PlanError([Problem(f"the limits freeze {n!r}, {rule}: {mend}") for n in unknown])
