"""Small loops as schedule graphs, for tests of the search."""

from __future__ import annotations

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning.modulo.schedule_graph import ScheduleGraph, schedule_graph
from tests.planning.instances import Instance


def graph_of(given: Instance) -> ScheduleGraph:
    """Return the instance as a schedule graph."""
    return schedule_graph(
        resolve_plan(given.plan), given.costs, streams=given.streams, frozen=given.limits.frozen
    )


def host_work(
    *times_us: float,
    chain: bool = True,
    frozen: tuple[str, ...] = (),
    handover_us: float = 0.0,
) -> ScheduleGraph:
    """Return a graph of tasks a, b, c, ... with these times, as a chain or independent."""
    names = [chr(ord("a") + k) for k in range(len(times_us))]
    deps = [(names[k], names[k - 1]) for k in range(1, len(names))] if chain else []
    plan = PipelinePlan({name: TaskSchedule() for name in names}, deps=deps)
    costs = {name: TaskCost(host_us=us) for name, us in zip(names, times_us, strict=True)}
    model = CostModel(costs, handover_us=handover_us)
    return schedule_graph(resolve_plan(plan), model, streams=False, frozen=frozen)
