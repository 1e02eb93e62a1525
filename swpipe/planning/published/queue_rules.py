"""What a planner may not change: the caller's own tasks, and the queues of the communicators.

**The caller's own tasks** name no stream and run on the caller's thread. They train the model;
planners leave them where they are, and let the rest run ahead of them.

**A communicator's queue** is the globally ordered tasks that use it, in the order in which the
plan at hand submits them within a period. Its tickets stay in that order, whatever else moves. A
communicator is a resource in the cost model; globally ordered tasks without one share one that
nobody has named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from swpipe._engine.program import compile_plan
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.dependence import topological
from swpipe.core.errors import PlanError, Problem
from swpipe.core.plan import DEFAULT_GROUP, Pair, PipelinePlan
from swpipe.core.resolved import ResolvedPlan, dependences_of, resolve_plan
from swpipe.planning.limits import Limits
from swpipe.planning.simulation.simulator import steady_interval

_UNNAMED = ""


def require(plan: PipelinePlan, costs: CostModel, limits: Limits | None = None) -> ResolvedPlan:
    """Refuse what a planner cannot begin with; resolve the rest.

    Args:
        plan: The plan at hand.
        costs: What its tasks cost.
        limits: What the planner must keep to, where it takes limits.

    Raises:
        PlanError: The plan cannot run, or names a stream by a ``torch.Stream``; a task has no cost;
            a frozen task is unknown.
    """
    if objects := [n for n, e in plan.schedule.items() if isinstance(e.stream, torch.Stream)]:
        raise PlanError(
            [
                Problem(
                    f"task {name!r}: its stream is a torch.Stream, and planners move tasks between "
                    "streams by name: name the stream instead",
                    (name,),
                )
                for name in objects
            ]
        )
    resolved = validate(plan)
    costs.of(plan.schedule)
    if limits is not None:
        limits.check(plan)
    return resolved


def interval_us(plan: PipelinePlan, costs: CostModel, *, streams: bool) -> float:
    """What ``simulate`` says of the interval, in microseconds; for plans that are known to run."""
    program = compile_plan(resolve_plan(plan), streams=streams)
    return steady_interval(program, costs, streams=streams).ii_us


def callers_own(plan: PipelinePlan) -> frozenset[str]:
    """The tasks without a stream on the caller's thread."""
    return frozenset(
        name
        for name, entry in plan.schedule.items()
        if entry.stream is None and entry.thread_group == DEFAULT_GROUP
    )


def communicator_queues(resolved: ResolvedPlan, costs: CostModel) -> tuple[tuple[str, ...], ...]:
    """Each communicator's tasks in the order of a period; those of a single task are left out."""
    queues: dict[str, list[str]] = defaultdict(list)
    for name in resolved.period_order:
        if resolved.plan.schedule[name].globally_ordered:
            for communicator in costs.tasks[name].resources or (_UNNAMED,):
                queues[communicator].append(name)
    return tuple(tuple(queue) for queue in queues.values() if len(queue) > 1)


def tickets(queues: Sequence[Sequence[str]]) -> Iterator[Pair]:
    """Every two neighbours in a queue, as (later, sooner)."""
    for queue in queues:
        yield from ((later, sooner) for sooner, later in pairwise(queue))


def fire_order(
    plan: PipelinePlan, priority: Sequence[str], queues: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """The order of a period that is nearest to ``priority``.

    Args:
        plan: The plan; its own order is not looked at.
        priority: All its tasks; of those that may be next, the first in this list is.
        queues: What ``communicator_queues`` found.

    Raises:
        CycleError: The plan's edges of lag 0 and the queues contradict each other.
    """
    edges = [dep[:2] for dep in dependences_of(plan) if dep.lag == 0]
    rank = {name: (place,) for place, name in enumerate(priority)}
    return tuple(topological(rank, [*edges, *tickets(queues)]))
