"""Critical-path list scheduling: the order within a period, and nothing else.

The scheduler places the tasks of one period in time, subject to the edges of lag 0 and to threads,
streams and named resources that do one thing at a time. Among the tasks whose producers have been
placed, the next is the one whose work can start first; among several, the one with the longest path
to the end of the period along edges of lag 0; then the one declared first.

Work starts when the task's thread is free and, for device work, its stream, its named resources and
the device work of its producers. Other periods and back-pressure are not considered. So both orders
are simulated, and the given order is kept unless the new one is better.

Stages, streams, thread groups, depth and the order of each communicator's tasks do not change.

Source: Graham, "Bounds for certain multiprocessing anomalies", 1966, and much since; the
schedulable engine of NVIDIA's recsys-examples has such a planner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PipelinePlan
from swpipe.planning.published.queue_rules import (
    check_inputs,
    communicator_queues,
    queue_edges,
    remaining_us,
    stream_of,
)
from swpipe.planning.simulation.interval import interval_us

_LOCK = ("interpreter lock", "")


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """The result of list scheduling.

    Attributes:
        plan: The given plan, with the better of the two orders.
        ii_us: Its simulated interval; microseconds.
        given_ii_us: The simulated interval of the given plan; microseconds.
        listed: The order that the scheduler found, whether or not it was chosen.
        path_us: Task to the longest path from its start to the end of the period; microseconds.
        why: What was chosen, in words.
    """

    plan: PipelinePlan
    ii_us: float
    given_ii_us: float
    listed: tuple[str, ...]
    path_us: Mapping[str, float]
    why: str


def list_schedule(plan: PipelinePlan, costs: CostModel, *, streams: bool = True) -> ListSchedule:
    """Order the tasks of a period by their longest remaining path.

    Args:
        plan: Serial or pipelined; it may name tasks without functions.
        costs: A cost for each of its tasks.
        streams: Plan for a device with streams; on a CPU all cost is host time.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
    """
    resolved = check_inputs(plan, costs)
    edges = [dep[:2] for dep in resolved.within_period]
    edges += queue_edges(communicator_queues(resolved, costs))
    path = remaining_us(resolved.period_order, costs, edges)
    producers: dict[str, set[str]] = {name: set() for name in plan.schedule}
    for consumer, producer in edges:
        producers[consumer].add(producer)
    order = _Period(plan, costs.tasks, streams).fill(producers, path)
    listed = replace(plan, order=order)
    given_ii = interval_us(plan, costs, streams=streams)
    listed_ii = interval_us(listed, costs, streams=streams)
    if listed_ii < given_ii:
        why = f"the longest path first: {given_ii:.0f} us becomes {listed_ii:.0f} us"
        return ListSchedule(listed, listed_ii, given_ii, order, path, why)
    why = f"the given order is kept: {given_ii:.0f} us; longest path first: {listed_ii:.0f} us"
    return ListSchedule(plan, given_ii, given_ii, order, path, why)


class _Period:
    """One period while tasks are placed: when each thread, stream and resource is free again."""

    def __init__(self, plan: PipelinePlan, costs: Mapping[str, TaskCost], streams: bool) -> None:
        self._plan = plan
        self._thread = {n: ("thread", e.thread_group) for n, e in plan.schedule.items()}
        self._costs = costs
        self._streams = streams
        self._free: dict[tuple[str, str | None], float] = defaultdict(float)
        self._submitted: dict[str, float] = {}
        self._done: dict[str, float] = {}

    def fill(self, producers: Mapping[str, set[str]], path: Mapping[str, float]) -> tuple[str, ...]:
        """Place every task; return them in that order."""
        declared = list(self._plan.schedule)
        while len(self._done) < len(declared):
            ready = [n for n in declared if n not in self._done and producers[n] <= {*self._done}]
            name = min(ready, key=lambda n: (self._begins(n, producers[n])[2], -path[n]))
            self._place(name, producers[name])
        return tuple(self._done)

    def _begins(self, name: str, producers: set[str]) -> tuple[float, float, float]:
        """When the host work starts, when it ends, and when the main work starts."""
        host_us, device_us = self._times(name)
        held = [self._free[key] for key in self._held(name)]
        host = max([self._free[self._thread[name]], *(self._submitted[p] for p in producers)])
        if self._costs[name].gil_us:
            host = max(host, self._free[_LOCK])
        if not device_us:
            host = max([host, *held])
            return host, host + host_us, host
        waits = [self._done[p] for p in producers]
        return host, host + host_us, max([host + host_us, *held, *waits])

    def _place(self, name: str, producers: set[str]) -> None:
        _, device_us = self._times(name)
        host, submitted, begins = self._begins(name, producers)
        done = begins + device_us if device_us else submitted
        self._free[self._thread[name]] = submitted
        self._free[_LOCK] = max(self._free[_LOCK], host + self._costs[name].gil_us)
        for key in self._held(name):
            self._free[key] = done
        self._submitted[name] = submitted
        self._done[name] = max([done, *(self._done[p] for p in producers)])

    def _times(self, name: str) -> tuple[float, float]:
        cost = self._costs[name]
        return (cost.host_us, cost.device_us) if self._streams else (cost.total_us, 0.0)

    def _held(self, name: str) -> list[tuple[str, str | None]]:
        """What the main work holds: named resources, and the stream if it is device work."""
        held: list[tuple[str, str | None]] = [("resource", r) for r in self._costs[name].resources]
        if self._times(name)[1]:
            held.append(("stream", stream_of(self._plan, name)))
        return held
