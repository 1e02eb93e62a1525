"""Critical-path list scheduling, which changes only the order of the tasks within a period.

The scheduler places the tasks of one period in time. It obeys the edges of lag 0, and runs one task
at a time on each thread, stream and named resource. The next task is the one whose work can start
first, among all tasks whose producers have been placed. Among equals, it is the task with the
longest path to the end of the period along edges of lag 0, and then the task whose name comes
first.

Work starts when the task's thread is free. Device work also waits for its stream, its named
resources and the device work of its producers. The scheduler does not consider other periods and
back-pressure. Therefore the given and the new order are both simulated, and the given order is kept
unless the new order is better.

Source: R. L. Graham, "Bounds for certain multiprocessing anomalies", 1966. The schedulable engine
of NVIDIA's recsys-examples has a planner of this kind.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from swpipe import PipelinePlan
from swpipe.planning import Limits
from swpipe.planning.simulation.interval import interval_us
from swpipe.profiler import CostModel

from .queue_rules import (
    Pair,
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
        plan: The given plan with the better of the two orders.
        ii_us: The simulated interval of this plan, in microseconds.
        given_ii_us: The simulated interval of the given plan, in microseconds.
        listed: The order that the scheduler has found, whether or not it was chosen.
        why: A sentence about the chosen order.
    """

    plan: PipelinePlan
    ii_us: float
    given_ii_us: float
    listed: tuple[str, ...]
    why: str


def list_schedule(plan: PipelinePlan, costs: CostModel, *, streams: bool = True) -> ListSchedule:
    """Order the tasks of a period by their longest remaining path.

    Args:
        plan: The plan to reorder, serial or pipelined. It may name tasks without functions. Its
            stages, streams, thread groups and depth stay, and so does the order of each
            communicator's tasks.
        costs: The cost of each task, in microseconds.
        streams: Whether to plan for a device with streams. Otherwise all cost is host time.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
    """
    resolved = check_inputs(plan, costs, Limits())
    edges = period_edges(plan, communicator_queues(resolved, costs))
    path = remaining_us(resolved.period_order, costs, edges)
    order = _placed(plan, costs, streams, edges, path)
    # The interval is the steady state's, which the placement of one period does not show.
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
    """Return the tasks in the order in which the scheduler places them."""
    # Threads, streams, resources and the interpreter lock, each with the time when it is free.
    free: dict[object, float] = defaultdict(float)
    # When each task's host work has ended, and when its device work has.
    submitted: dict[str, float] = {}
    done: dict[str, float] = {}
    left = {name: [p for c, p in edges if c == name] for name in plan.schedule}

    def begins(name: str) -> tuple[float, float]:
        """Return the starts of a task's host work and of its main work, in microseconds.

        The main work is the device work, or the host work of a task without device work.
        """
        cost = costs.tasks[name]
        producers = left[name]
        host = max([free[plan.schedule[name].thread_group], *(submitted[p] for p in producers)])
        if cost.gil_us:
            host = max(host, free[LOCK])
        held = [free[what] for what in holds(name)]
        if not (streams and cost.device_us):
            return (start := max([host, *held])), start
        return host, max([host + cost.host_us, *held, *(done[p] for p in producers)])

    def holds(name: str) -> list[object]:
        """Return what the main work occupies: named resources, and the stream for device work."""
        cost = costs.tasks[name]
        stream = [("stream", stream_of(plan, name))] if streams and cost.device_us else []
        return [*stream, *(("resource", resource) for resource in cost.resources)]

    # By name in the end, so that equal tasks do not make the result depend on dictionaries.
    while left:
        ready = [name for name, producers in left.items() if done.keys() >= {*producers}]
        name = min(ready, key=lambda name: (begins(name)[1], -path[name], name))
        cost, (host, main) = costs.tasks[name], begins(name)
        on_device = streams and cost.device_us
        # Without streams the device's part of the cost is host time, too.
        submitted[name] = host + (cost.host_us if streams else cost.total_us)
        ended = main + cost.device_us if on_device else submitted[name]
        free[plan.schedule[name].thread_group] = submitted[name]
        # The host work holds the lock from its start on, for gil_us in all.
        free[LOCK] = max(free[LOCK], host + cost.gil_us)
        free.update(dict.fromkeys(holds(name), ended))
        done[name] = max([ended, *(done[p] for p in left.pop(name))])
    return tuple(done)
