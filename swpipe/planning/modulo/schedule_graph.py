"""The schedule graph of a loop, which holds the input of the modulo scheduler.

Every task is one or two *operations*: its host work, which a thread runs, and on a device with
streams its device work, which a stream runs. Edges between operations carry a distance in
iterations. Operations reserve resources, of which each serves one operation at a time::

    task v      host v  ──>  device v
    (c, p, d)   host p  ──>  host c           the producer is launched first
                device p ──> device c         and its device work is done first, unless host_only
                device p ──> host c           if p blocks
    frame       <admit> ──>  host v ──> <retire>      every iteration begins and ends so

``<admit>`` and ``<retire>`` are numbered behind the tasks, and take no time.

Resources are streams, the order in which tasks submit to a stream, the turn of globally ordered
tasks, the interpreter lock, and the resources that the cost model names. Threads are not among
them: the planner chooses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple, TypeAlias

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PULL, PipelinePlan, is_host
from swpipe.core.resolved import ResolvedPlan
from swpipe.program import ADMIT, RETIRE

LOCK = "the interpreter lock"
TURN = "submission in global order"
CALLERS_STREAM = f"stream {stream_name(None)!r}"

TOLERANCE = 1e-9
"""Intervals that differ by less than this fraction are equal."""


Arcs: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""For each task, the tasks that it is tied to, with the distances of the dependences."""


class OperationEdge(NamedTuple):
    """A constraint between the start times of two operations.

    The head on iteration i begins at least ``time_us`` after the tail on iteration i - distance.
    """

    tail: int
    head: int
    time_us: float
    distance: int


@dataclass(frozen=True)
class ScheduleGraph:
    """The operations, dependences and resources of a loop; tasks are numbers in the plan's order.

    Attributes:
        names: The name of each task, then of ``<admit>`` and ``<retire>``.
        streams: Whether there are device operations; if not, all cost is host time.
        host_us: The time of each task on its thread, including the device time if it blocks.
        launch_us: The time of each task on its thread before its device work.
        device_us: The time of each task on its stream; 0 without streams.
        blocks: The tasks whose thread waits for their device work.
        uses: For each resource, the operations that reserve it, and for how many microseconds from
            their start.
        edges: Dependences between operations, edges from host work to device work, edges that keep
            frozen tasks in one period, and edges from ``<admit>`` and to ``<retire>``.
        deps: The dependences between tasks, as (consumer, producer, distance).
        frozen: Tasks that stay on the caller's thread, in the last stage. A consumer of such a task
            in the same iteration is in the last stage too, because of its dependence.
        serial: The tasks in the order of a serial run.
        least_depth: The least number of iterations in flight: above 1 only if ``same_period_deps``
            reach into later iterations.
        handover_us: The time until a thread that waited for another one runs again.
        pull_us: The time that a pull takes, on the caller's thread or in ``pull_group``.
        pull_group: The thread group that pulls batches; None for the caller's thread.
        run_ahead: How many iterations beyond the depth may be launched; None for any number, and
            without streams.
    """

    names: tuple[str, ...]
    streams: bool
    host_us: tuple[float, ...]
    launch_us: tuple[float, ...]
    device_us: tuple[float, ...]
    blocks: frozenset[int]
    uses: Mapping[str, Mapping[int, float]]
    edges: tuple[OperationEdge, ...]
    deps: tuple[tuple[int, int, int], ...]
    frozen: frozenset[int]
    serial: tuple[int, ...]
    least_depth: int
    handover_us: float
    pull_us: float = 0.0
    pull_group: str | None = None
    run_ahead: int | None = None

    @property
    def size(self) -> int:
        """The number of tasks."""
        return len(self.host_us)

    @property
    def admit(self) -> int:
        """The number of ``<admit>``."""
        return self.size

    @property
    def retire(self) -> int:
        """The number of ``<retire>``."""
        return self.size + 1

    def device(self, task: int) -> int:
        """Return the operation of a task's device work; its host work has the task's number."""
        return len(self.names) + task

    def frame_edges(self, depth: int) -> list[OperationEdge]:
        """Return the edges that limit the iterations in flight, on the host and on the device."""
        edges = [OperationEdge(self.retire, self.admit, 0.0, depth)]
        if self.run_ahead is not None:
            done = self.device(self.retire)
            ahead = depth + self.run_ahead
            edges.append(OperationEdge(done, self.admit, self.handover_us, ahead))
        return edges

    @property
    def frozen_us(self) -> float:
        """The host time of the frozen tasks, which are all on the caller's thread."""
        return sum(self.host_us[v] for v in self.frozen)

    @cached_property
    def producers(self) -> Arcs:
        """The producers of each task, with the distances of the dependences."""
        return _arcs(self.size, self.deps)

    @cached_property
    def consumers(self) -> Arcs:
        """The consumers of each task, with the distances of the dependences."""
        return _arcs(self.size, [(p, c, d) for c, p, d in self.deps])

    @cached_property
    def sharing(self) -> tuple[frozenset[int], ...]:
        """For each task, the tasks that reserve one of its resources, itself included."""
        users = [{operation % len(self.names) for operation in uses} for uses in self.uses.values()]
        return tuple(
            frozenset[int]().union(*(tasks for tasks in users if v in tasks))
            for v in range(self.size)
        )


def _arcs(size: int, deps: Iterable[tuple[int, int, int]]) -> Arcs:
    arcs: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for task, other, distance in deps:
        if task != other:
            arcs[task].append((other, distance))
    return arcs


def schedule_graph(
    resolved: ResolvedPlan, costs: CostModel, *, streams: bool, frozen: Sequence[str] = ()
) -> ScheduleGraph:
    """Return the schedule graph of a valid plan; its stages define ``same_period_deps``.

    Args:
        resolved: The plan.
        costs: A cost for each task.
        streams: Whether the device has streams.
        frozen: The names of the frozen tasks.

    Raises:
        PlanError: A task has no cost.
    """
    plan = resolved.plan
    names = (*plan.schedule, ADMIT, RETIRE)
    n = len(plan.schedule)
    tasks = range(n)
    admit, retire = range(n, n + 2)
    index = {name: v for v, name in enumerate(names)}
    task_costs = list(costs.of(plan.schedule).values())
    deps = tuple((index[d.consumer], index[d.producer], d.distance) for d in resolved.dependences)
    fixed = frozenset(index[name] for name in frozen)
    on_stream = [streams and not is_host(entry.stream) for entry in plan.schedule.values()]
    each = list(zip(task_costs, on_stream, strict=True))
    # A task that blocks occupies its thread until its device work is done. Without a stream the
    # device work is done on the thread.
    host = tuple(c.host_us if on and not c.blocks else c.total_us for c, on in each)
    launch = tuple(c.host_us if on else c.total_us for c, on in each)
    device = tuple(c.device_us if on else 0.0 for c, on in each)
    blocks = frozenset(v for v, (c, on) in enumerate(each) if on and c.blocks)
    # Host work follows host work for each dependence: the engine launches in this order, even if
    # only the device has to wait.
    edges = [OperationEdge(p, c, host[p], d) for c, p, d in deps]
    # Every iteration begins with <admit> and ends with <retire>.
    edges += [OperationEdge(admit, v, 0.0, 0) for v in tasks]
    edges += [OperationEdge(v, retire, host[v], 0) for v in tasks]
    if streams:
        # Device work has the numbers after all host work.
        m = len(names)
        # It follows device work, except for dependences that only order the host.
        host_only = (dep.host_only for dep in resolved.dependences)
        of_streams = [dep for dep, alone in zip(deps, host_only, strict=True) if not alone]
        edges += [OperationEdge(v, m + v, launch[v], 0) for v in tasks]
        edges += [OperationEdge(m + p, m + c, device[p], d) for c, p, d in of_streams]
        edges += [OperationEdge(m + p, c, device[p], d) for c, p, d in deps if p in blocks]
        edges += [OperationEdge(m + v, m + retire, device[v], 0) for v in tasks]
        edges += [OperationEdge(m + v, retire, device[v], 0) for v in blocks]
        edges.append(OperationEdge(retire, m + retire, 0.0, 0))
    # Frozen tasks share a period and a thread: those of the next iteration begin when all of this
    # one have ended. An edge of distance 1 between each pair says so.
    edges += [OperationEdge(u, v, host[u], 1) for u, v in permutations(sorted(fixed), 2)]
    return ScheduleGraph(
        names=names,
        streams=streams,
        host_us=host,
        launch_us=launch,
        device_us=device,
        blocks=blocks,
        uses=_uses(plan, task_costs, on_stream, host),
        edges=tuple(edges),
        deps=deps,
        frozen=fixed,
        serial=tuple(index[name] for name in resolved.serial_order),
        least_depth=1 + max(least_stages(deps, dict.fromkeys(tasks, 0)).values()),
        handover_us=costs.handover_us,
        pull_us=costs.tasks.get(PULL, TaskCost()).total_us,
        pull_group=plan.pull_group,
        run_ahead=plan.launch_limit if streams else None,
    )


def _uses(
    plan: PipelinePlan,
    costs: Sequence[TaskCost],
    on_stream: Sequence[bool],
    host_us: Sequence[float],
) -> Mapping[str, Mapping[int, float]]:
    """Return the operations that reserve each resource, with their times."""
    uses: dict[str, dict[int, float]] = defaultdict(dict)
    first_device = len(costs) + 2
    for v, (entry, cost) in enumerate(zip(plan.schedule.values(), costs, strict=True)):
        device = first_device + v
        # As in the simulator: a resource is held during the device work, or the host work if there
        # is none.
        on_device = on_stream[v] and cost.device_us > 0
        for resource in cost.resources:
            held = (device, cost.device_us) if on_device else (v, host_us[v])
            uses[f"resource {resource!r}"].update([held])
        if on_stream[v]:
            stream = f"stream {stream_name(entry.stream)!r}"
            uses[stream][device] = cost.device_us
            # Tasks of one named stream are submitted in period order, also from several threads.
            if entry.stream is not None:
                uses[f"submission to {stream}"][v] = host_us[v]
        if cost.gil_us:
            uses[LOCK][v] = cost.gil_us
        if entry.globally_ordered:
            uses[TURN][v] = host_us[v]
    # A resource of a single host operation restricts nothing. A stream is kept even with one task:
    # it is a row of the estimate.
    return {name: of for name, of in uses.items() if len(of) > 1 or min(of) >= first_device}


def least_stages(deps: Sequence[tuple[int, int, int]], given: Mapping[int, int]) -> dict[int, int]:
    """Return the least stages that follow from dependences, if some tasks are in given stages.

    Args:
        deps: (consumer, producer, distance): the consumer's stage is at least the producer's stage
            minus the distance.
        given: Least stages of some tasks. Tasks that do not depend on them are left out.
    """
    stages = dict(given)
    # Longest paths by Bellman-Ford; no path takes more steps than there are dependences.
    for _ in deps:
        before = dict(stages)
        for consumer, producer, distance in deps:
            if producer in stages:
                least = stages[producer] - distance
                stages[consumer] = max(stages.get(consumer, least), least)
        if stages == before:
            break
    return stages
