"""The search for the least interval, by annealing with restarts, under one limit after another.

The effort is counted in estimated operations instead of time: the same input gives the same plan.

Source: B. R. Rau, "Iterative modulo scheduling" (MICRO-27, 1994), for the lower bound as the goal.
There, tasks are placed one by one at a fixed interval. Here a whole schedule is changed move by
move, and its interval is the result, because placing tasks one by one hardly ever fills threads
that must not be idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.errors import InternalError
from swpipe.planning.modulo.annealing import Annealer
from swpipe.planning.modulo.bounds import bounds_of
from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, plan_of
from swpipe.planning.modulo.schedule_graph import TOLERANCE, ScheduleGraph
from swpipe.planning.modulo.starts import first_schedule, packed
from swpipe.planning.simulation.interval import interval_us

_WORK_PER_TASK = 50_000
"""The usual effort, in estimated operations: about a second for 14 tasks."""

_MOST_COUNTED = 200
"""The number of tasks above which more tasks do not lengthen a search."""

LIMITS_SHARE = 0.07
"""The share of the effort that is spent on each lower limit on depth or threads."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A schedule, its plan, and its simulated interval in microseconds."""

    schedule: ModuloSchedule
    plan: PipelinePlan
    ii_us: float

    @property
    def depth(self) -> int:
        """The number of iterations in flight, without the one that a ``pull_group`` pulls ahead."""
        return self.plan.depth - (self.plan.pull_group is not None)


class Search:
    """A search over the plans of a loop, under several limits, with a given effort."""

    def __init__(
        self, base: PipelinePlan, costs: CostModel, graph: ScheduleGraph, effort: float = 1.0
    ) -> None:
        self.graph = graph
        self._base = base
        self._costs = costs
        self._work = effort * _WORK_PER_TASK * min(graph.size, _MOST_COUNTED)

    def bound_us(self, threads: int, depth: int) -> float:
        """Return a lower bound on the interval under limits on threads and iterations in flight."""
        if depth < self.graph.least_depth:
            # There is no plan of so few stages.
            return math.inf
        return bounds_of(self.graph, threads, depth).ii_us

    def best(self, threads: int, depth: int) -> FoundPlan:
        """Return the best plan found within the limits on threads and iterations in flight."""
        best = self.serial()
        bound_us = self.bound_us(threads, depth)
        # A serial plan that reaches the bound cannot be beaten, so nothing is searched.
        if best.ii_us <= bound_us * (1 + TOLERANCE):
            return best
        better = self.reach(bound_us, threads, depth, share=1.0)
        return best if better is None or better.ii_us >= best.ii_us else better

    def reach(self, goal_us: float, threads: int, depth: int, share: float) -> FoundPlan | None:
        """Return the first plan found that reaches ``goal_us``, or else the best one.

        ``share`` is the share of the effort that may be spent.
        """

        def simulate(schedule: ModuloSchedule) -> float:
            trial = self.simulated(schedule, depth)
            return math.inf if trial is None else trial.ii_us

        first = first_schedule(self.graph, threads, depth)
        if first is None:
            return None
        annealer = Annealer(Estimator(self.graph, threads, depth), simulate, goal_us)
        annealer.search(first, self._work * share)
        incumbent = annealer.incumbent
        return None if incumbent is None else self.simulated(incumbent, depth)

    def serial(self) -> FoundPlan:
        """Return a plan on the caller's thread, in as few stages as possible."""
        depth = self.graph.least_depth
        schedule = first_schedule(self.graph, 1, depth)
        serial_plan = None if schedule is None else self.simulated(schedule, depth)
        if serial_plan is None:
            raise InternalError("the smallest stages do not satisfy same_period_deps")
        return serial_plan

    def simulated(self, schedule: ModuloSchedule, depth: int) -> FoundPlan | None:
        """Return the plan of a schedule, with its interval; None if ``plan_of`` has none."""
        plan = plan_of(self._base, self.graph, schedule, depth)
        if plan is None:
            return None
        ii_us = interval_us(plan, self._costs, streams=self.graph.streams)
        return FoundPlan(schedule, plan, ii_us)

    def tidy(self, best: FoundPlan) -> FoundPlan:
        """Return the plan with neighbours on one thread, where that is no slower."""
        most_us = best.ii_us * (1 + TOLERANCE)
        tasks = reversed(self.graph.serial)
        thread = packed(self.graph, tasks, best.schedule.threads, most_us, min)
        if thread is None:
            return best
        plan = self.simulated(replace(best.schedule, thread=thread), best.depth)
        return best if plan is None or plan.ii_us > most_us else plan
