"""What the planners must not change: the caller's tasks, and the order of a communicator's tasks.

**The caller's tasks** have no stream and run on the caller's thread. They train the model; planners
leave them there and let the others run ahead of them.

**A communicator's queue** is the globally ordered tasks that use it, in the order in which the
given plan submits them within a period. They keep this order. A communicator is a resource in the
cost model; globally ordered tasks without a resource share an unnamed one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.dependence import topological
from swpipe.core.plan import DEFAULT_GROUP, Pair, PipelinePlan
from swpipe.core.resolved import ResolvedPlan, dependences_of
from swpipe.errors import PlanError, Problem
from swpipe.planning.limits import Limits

Queues = tuple[tuple[str, ...], ...]
"""Each communicator's tasks in period order, for communicators of two or more tasks."""


def check_inputs(plan: PipelinePlan, costs: CostModel, limits: Limits) -> ResolvedPlan:
    """Refuse a plan, costs or limits that a planner cannot use; resolve the plan.

    Raises:
        PlanError: The plan cannot run, or names a stream by a ``torch.Stream``; a task has no cost;
            a frozen task is unknown.
    """
    if objects := [n for n, e in plan.schedule.items() if isinstance(e.stream, torch.Stream)]:
        rule = "its stream is a torch.Stream, and planners move tasks between streams by name"
        mend = "name the stream instead"
        raise PlanError([Problem(f"task {n!r}: {rule}: {mend}", (n,)) for n in objects])
    resolved = validate(plan)
    costs.of(plan.schedule)
    limits.check(plan)
    return resolved


def stream_of(plan: PipelinePlan, name: str) -> str | None:
    """The name of a task's stream, or None."""
    stream = plan.schedule[name].stream
    return stream if isinstance(stream, str) else None


def caller_tasks(plan: PipelinePlan) -> frozenset[str]:
    """The tasks without a stream on the caller's thread."""
    return frozenset(
        name
        for name, entry in plan.schedule.items()
        if entry.stream is None and entry.thread_group == DEFAULT_GROUP
    )


def communicator_queues(resolved: ResolvedPlan, costs: CostModel) -> Queues:
    """The queues of a plan."""
    queues: dict[str, list[str]] = defaultdict(list)
    for name in resolved.period_order:
        if resolved.plan.schedule[name].globally_ordered:
            for communicator in costs.tasks[name].resources or ("",):
                queues[communicator].append(name)
    return tuple(tuple(queue) for queue in queues.values() if len(queue) > 1)


def period_edges(plan: PipelinePlan, queues: Queues) -> list[Pair]:
    """(consumer, producer) within a period: the plan's edges of lag 0, and the queues'."""
    edges = [dep[:2] for dep in dependences_of(plan) if dep.lag == 0]
    return edges + [(later, sooner) for queue in queues for sooner, later in pairwise(queue)]


def remaining_us(order: Sequence[str], costs: CostModel, edges: Iterable[Pair]) -> dict[str, float]:
    """Each task's longest path along (consumer, producer) edges, its own time counted.

    ``order`` has all tasks, producers first.
    """
    consumers: dict[str, list[str]] = defaultdict(list)
    for consumer, producer in edges:
        consumers[producer].append(consumer)
    path: dict[str, float] = {}
    for name in reversed(order):
        after = max((path[consumer] for consumer in consumers[name]), default=0.0)
        path[name] = costs.tasks[name].total_us + after
    return path


def closest_order(plan: PipelinePlan, priority: Sequence[str], queues: Queues) -> tuple[str, ...]:
    """The valid order of a period that is closest to ``priority``, in which the first go first.

    The plan's own order is ignored.

    Raises:
        CycleError: The plan's edges of lag 0 and the queues contradict each other.
    """
    rank = {name: (place,) for place, name in enumerate(priority)}
    return tuple(topological(rank, period_edges(plan, queues)))
