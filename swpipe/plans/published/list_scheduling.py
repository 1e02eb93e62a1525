"""Critical-path list scheduling: the order within a period, and nothing else.

The scheduler places the tasks of one period in time, subject to the edges of lag 0 and to threads,
streams and named resources that do one thing at a time. Among the tasks whose producers have been
placed, the next is the one whose work can start first; among several, the one with the longest path
to the end of the period along edges of lag 0; then the one whose name comes first.

Work starts when the task's thread is free and, for device work, its stream, its named resources and
the device work of its producers. Other periods and back-pressure are not considered. So both orders
are simulated, and the given order is kept unless the new one is better.

Source: Graham, "Bounds for certain multiprocessing anomalies", 1966, and much since; the
schedulable engine of NVIDIA's recsys-examples has such a planner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from swpipe.core.costs import CostModel
from swpipe.core.plan import Pair, PipelinePlan
from swpipe.planning.limits import Limits
from swpipe.planning.simulation.interval import interval_us
from swpipe.plans.published.queue_rules import (
    check_inputs,
    communicator_queues,
    period_edges,
    remaining_us,
    stream_of,
)

LOCK = ("interpreter lock",)


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """The result of list scheduling.

    Attributes:
        plan: The given plan, with the better of the two orders.
        ii_us: Its simulated interval; microseconds.
        given_ii_us: The simulated interval of the given plan; microseconds.
        listed: The order that the scheduler found, whether or not it was chosen.
        why: What was chosen, in words.
    """

    plan: PipelinePlan
    ii_us: float
    given_ii_us: float
    listed: tuple[str, ...]
    why: str


def list_schedule(plan: PipelinePlan, costs: CostModel, *, streams: bool = True) -> ListSchedule:
    """Order the tasks of a period by their longest remaining path.

    Args:
        plan: Serial or pipelined; it may name tasks without functions. Its stages, streams, thread
            groups and depth stay, and the order of each communicator's tasks.
        costs: A cost for each of its tasks.
        streams: Plan for a device with streams; on a CPU all cost is host time.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
    """
    resolved = check_inputs(plan, costs, Limits())
    edges = period_edges(plan, communicator_queues(resolved, costs))
    path = remaining_us(resolved.period_order, costs, edges)
    order = _placed(plan, costs, streams, edges, path)
    listed = replace(plan, order=order)
    given_us = interval_us(plan, costs, streams=streams)
    listed_us = interval_us(listed, costs, streams=streams)
    if listed_us < given_us:
        why = f"the longest path first: {given_us:.0f} us becomes {listed_us:.0f} us"
        return ListSchedule(listed, listed_us, given_us, order, why)
    why = f"the given order is kept: {given_us:.0f} us; longest path first: {listed_us:.0f} us"
    return ListSchedule(plan, given_us, given_us, order, why)


def _placed(
    plan: PipelinePlan, costs: CostModel, streams: bool, edges: list[Pair], path: dict[str, float]
) -> tuple[str, ...]:
    """The tasks in the order in which they are placed."""
    free: dict[object, float] = defaultdict(float)  # what does one thing at a time, to when
    submitted: dict[str, float] = {}
    done: dict[str, float] = {}
    left = {name: [p for c, p in edges if c == name] for name in plan.schedule}

    def begins(name: str) -> tuple[float, float]:
        """When the host work starts, and when the main work does."""
        cost, producers = costs.tasks[name], left[name]
        host = max([free[plan.schedule[name].thread_group], *(submitted[p] for p in producers)])
        if cost.gil_us:
            host = max(host, free[LOCK])
        held = [free[what] for what in holds(name)]
        if not (streams and cost.device_us):
            return (start := max([host, *held])), start
        return host, max([host + cost.host_us, *held, *(done[p] for p in producers)])

    def holds(name: str) -> list[object]:
        """What the main work holds: named resources, and the stream if it is device work."""
        cost = costs.tasks[name]
        stream = [("stream", stream_of(plan, name))] if streams and cost.device_us else []
        return [*stream, *(("resource", resource) for resource in cost.resources)]

    while left:
        ready = [name for name, producers in left.items() if done.keys() >= {*producers}]
        name = min(ready, key=lambda name: (begins(name)[1], -path[name], name))
        cost, (host, main) = costs.tasks[name], begins(name)
        on_device = streams and cost.device_us
        submitted[name] = host + (cost.host_us if streams else cost.total_us)
        ended = main + cost.device_us if on_device else submitted[name]
        free[plan.schedule[name].thread_group] = submitted[name]
        free[LOCK] = max(free[LOCK], host + cost.gil_us)
        free.update(dict.fromkeys(holds(name), ended))
        done[name] = max([ended, *(done[p] for p in left.pop(name))])
    return tuple(done)
