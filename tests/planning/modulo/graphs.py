"""For tests of the search: loops as operations, plans of them in numbers, who hears of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits
from swpipe.planning.modulo.layout import Layout, plan_of
from swpipe.planning.modulo.loop_graph import LoopGraph, loop_graph
from tests.planning.instances import Instance


def graph_of(given: Instance) -> LoopGraph:
    """The instance as a loop of operations."""
    return loop_graph(given.plan, given.costs, given.limits, streams=given.streams)


def host_work(
    *times_us: float,
    chain: bool = True,
    frozen: tuple[str, ...] = (),
    handover_us: float = 0.0,
    resources: tuple[str, ...] = (),
    deps: tuple[tuple[str, str], ...] = (),
) -> LoopGraph:
    """Tasks a, b, c and so on that block for these times, one after the other or on their own."""
    names = [chr(ord("a") + k) for k in range(len(times_us))]
    along = [(names[k], names[k - 1]) for k in range(1, len(names))] if chain else []
    plan = PipelinePlan({name: TaskSchedule() for name in names}, deps=[*along, *deps])
    costs = {
        name: TaskCost(host_us=us, resources=resources)
        for name, us in zip(names, times_us, strict=True)
    }
    limits = Limits(frozen=frozen)
    return loop_graph(plan, CostModel(costs, handover_us=handover_us), limits, streams=False)


def device_work(
    host_us: float, *times_us: float, deps: tuple[tuple[str, str], ...] = ()
) -> LoopGraph:
    """Tasks a, b, c and so on, each on a stream of its own; to submit each takes ``host_us``."""
    names = [chr(ord("a") + k) for k in range(len(times_us))]
    plan = PipelinePlan({name: TaskSchedule(stream=name) for name in names}, deps=deps)
    costs = {
        name: TaskCost(host_us=host_us, device_us=us)
        for name, us in zip(names, times_us, strict=True)
    }
    return loop_graph(plan, CostModel(costs), Limits(), streams=True)


def plan_at(given: Instance, graph: LoopGraph, layout: Layout) -> PipelinePlan:
    """The plan of a layout whose first stage may be above 0."""
    stages = tuple(stage - min(layout.stages) for stage in layout.stages)
    plan = plan_of(given.plan, graph, replace(layout, stages=stages), layout.depth)
    assert plan is not None
    return plan


@dataclass
class Listener:
    """Wants to hear of every plan, and says whatever it was told to say of it."""

    says_us: float | None = None
    enough: int = 10_000
    heard: list[Layout] = field(default_factory=list)
    promised_us: list[float] = field(default_factory=list)
    beaten_below_us: float = math.inf

    @property
    def turns_left(self) -> int:
        """None once it has heard enough."""
        return 0 if len(self.heard) >= self.enough else 10**6

    def ask(self, layout: Layout, promised_us: float) -> float:
        """Take note."""
        self.heard.append(layout)
        self.promised_us.append(promised_us)
        return promised_us if self.says_us is None else self.says_us
