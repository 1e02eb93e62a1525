"""The properties of a plan that planners keep: the caller's tasks, and the communicators' queues.

**The caller's tasks** have no stream and run on the caller's thread. They train the model. Planners
leave them on this thread, and let all other tasks run ahead of them.

**A communicator's queue** consists of the globally ordered tasks that use the communicator, in the
order in which the given plan submits them within a period. Planners keep this order. A communicator
is a resource in the cost model; globally ordered tasks without a resource share an unnamed
communicator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from swpipe import PipelinePlan
from swpipe.analysis.validation import validate
from swpipe.core.dependence import topological
from swpipe.core.resolved import ResolvedPlan, dependences_of
from swpipe.errors import PlanError, Problem
from swpipe.planning import Limits
from swpipe.profiler import CostModel

DEFAULT_GROUP = "default"
"""The thread group of the caller of ``progress()``."""

Pair = tuple[str, str]
"""A consumer and its producer."""

Queues = tuple[tuple[str, ...], ...]
"""The tasks of each communicator with two or more tasks, in the order of the period."""


def check_inputs(plan: PipelinePlan, costs: CostModel, limits: Limits) -> ResolvedPlan:
    """Check that a planner can use a plan, its costs and the limits, and return the resolved plan.

    Raises:
        PlanError: The plan cannot run, or has a ``torch.Stream`` in place of a stream's name; a
            task has no cost; or a frozen task is unknown.
    """
    # A torch.Stream has no name by which a planner could give it to another task. The error lists
    # all tasks that have one.
    if objects := [n for n, e in plan.schedule.items() if isinstance(e.stream, torch.Stream)]:
        rule = "its stream is a torch.Stream, and planners move tasks between streams by name"
        mend = "name the stream instead"
        raise PlanError([Problem(f"task {n!r}: {rule}: {mend}", (n,)) for n in objects])
    resolved = validate(plan)
    costs.of(plan.schedule)
    limits.check(plan)
    return resolved


def stream_of(plan: PipelinePlan, name: str) -> str | None:
    """Return the name of a task's stream, or None for the caller's stream."""
    stream = plan.schedule[name].stream
    return stream if isinstance(stream, str) else None


def caller_tasks(plan: PipelinePlan) -> frozenset[str]:
    """Return the tasks that have no stream and run on the caller's thread."""
    return frozenset(
        name
        for name, entry in plan.schedule.items()
        if entry.stream is None and entry.thread_group == DEFAULT_GROUP
    )


def communicator_queues(resolved: ResolvedPlan, costs: CostModel) -> Queues:
    """Return the communicators' queues of a plan."""
    # Two communicators are independent of each other, so each has a queue of its own. A task that
    # uses several is in several queues.
    queues: dict[str, list[str]] = defaultdict(list)
    for name in resolved.period_order:
        if resolved.plan.schedule[name].globally_ordered:
            for communicator in costs.tasks[name].resources or ("",):
                queues[communicator].append(name)
    return tuple(tuple(queue) for queue in queues.values() if len(queue) > 1)


def period_edges(plan: PipelinePlan, queues: Queues) -> list[Pair]:
    """Return the edges within a period as (consumer, producer): those of lag 0, and the queues'."""
    # Only lag 0 orders two tasks of the same period; a lag of 1 or more is an earlier period.
    edges = [dep[:2] for dep in dependences_of(plan) if dep.lag == 0]
    return edges + [(later, sooner) for queue in queues for sooner, later in pairwise(queue)]


def remaining_us(order: Sequence[str], costs: CostModel, edges: Iterable[Pair]) -> dict[str, float]:
    """Return the time of each task's longest path to the end, its own time included.

    Args:
        order: All tasks, producers before consumers.
        costs: The cost of each task, in microseconds.
        edges: The edges of the paths, as (consumer, producer).
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
    """Return a valid order of the period: of all tasks that can be next, the first in ``priority``.

    The plan's own order is ignored.

    Raises:
        CycleError: The plan's edges of lag 0 and the queues contradict each other.
    """
    rank = {name: (place,) for place, name in enumerate(priority)}
    return tuple(topological(rank, period_edges(plan, queues)))
