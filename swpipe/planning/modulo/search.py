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
from itertools import permutations

from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.errors import InternalError
from swpipe.planning.modulo.annealing import Annealer
from swpipe.planning.modulo.bounds import bounds_of
from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import (
    ModuloSchedule,
    ahead_of,
    plan_of,
    serial_schedule,
)
from swpipe.planning.modulo.schedule_graph import TOLERANCE, ScheduleGraph
from swpipe.planning.modulo.starts import starts
from swpipe.planning.simulation.interval import interval_us

_WORK = 200_000
_WORK_PER_TASK = 35_000
"""The usual effort, in estimated operations: about a second for 14 tasks."""

_MOST_COUNTED = 200
"""The number of tasks above which more tasks do not lengthen a search."""

_LIMITS_SHARE = 0.15
"""The share of the effort that is spent on lower limits on depth and threads."""

MOST_AHEAD = 3
"""The largest ``run_ahead`` that a planner chooses; more hardly ever gains anything."""


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

    @property
    def size(self) -> tuple[int, int, int]:
        """The iterations ahead, each of which holds a batch, then threads, then parts."""
        return ahead_of(self.plan), self.schedule.threads, self.schedule.parts

    def beats(self, other: FoundPlan) -> bool:
        """Return whether this plan is better: by interval, then by size."""
        if self.ii_us < other.ii_us * (1 - TOLERANCE):
            return True
        if self.ii_us > other.ii_us * (1 + TOLERANCE):
            return False
        return self.size < other.size


class Search:
    """A search over the plans of a loop, under several limits, with a given effort."""

    def __init__(
        self, base: PipelinePlan, costs: CostModel, graph: ScheduleGraph, effort: float = 1.0
    ) -> None:
        self.graph = graph
        self._base = base
        self._costs = costs
        self._work = effort * (_WORK + _WORK_PER_TASK * min(graph.size, _MOST_COUNTED))

    def bound_us(self, threads: int, depth: int) -> float:
        """Return a lower bound on the interval under limits on threads and iterations in flight."""
        if depth <= max(self.graph.least_stages):
            # There is no plan of so few stages.
            return math.inf
        return bounds_of(self.graph, threads, depth).ii_us

    def best(self, threads: int, depth: int) -> FoundPlan:
        """Return the best plan found within the limits on threads and iterations in flight.

        Call it before ``reach``: it leaves a small share of the effort for lower limits.
        """
        best = self.serial()
        bound_us = self.bound_us(threads, depth)
        # A serial plan that reaches the bound cannot be beaten, so nothing is searched.
        if best.ii_us <= bound_us * (1 + TOLERANCE):
            return best
        rest = self._work * _LIMITS_SHARE
        better = self.reach(bound_us, threads, depth, share=1 - _LIMITS_SHARE)
        self._work = rest
        return better if better is not None and better.beats(best) else best

    def reach(self, goal_us: float, threads: int, depth: int, share: float) -> FoundPlan | None:
        """Return the first plan found that reaches ``goal_us``, or else the best one.

        ``share`` is the share of the remaining effort that may be spent.
        """

        def simulate(schedule: ModuloSchedule, enough_us: float) -> float:
            # The annealer's schedules may begin at a later stage, which a plan must not.
            trial = self.simulated(schedule.from_stage_0(), depth, enough_us)
            return math.inf if trial is None else trial.ii_us

        # The annealer works on estimates; the plan returned is simulated once more, without a
        # limit, so that its interval is exact.
        annealer = Annealer(Estimator(self.graph, threads, depth), simulate, goal_us)
        annealer.search(starts(self.graph, threads, depth), self._work * share)
        self._work -= annealer.work
        if annealer.incumbent is None:
            return None
        return self.simulated(annealer.incumbent.from_stage_0(), depth)

    def serial(self) -> FoundPlan:
        """Return the plan of the serial schedule, in which only the device overlaps work."""
        schedule = serial_schedule(self.graph)
        serial_plan = self.simulated(schedule, max(schedule.stage) + 1)
        if serial_plan is None:
            raise InternalError("the least stages do not say what same_period_deps ask for")
        return serial_plan

    def simulated(
        self, schedule: ModuloSchedule, depth: int, enough_us: float = math.inf
    ) -> FoundPlan | None:
        """Return the plan of a schedule whose first stage is 0; None if ``plan_of`` has none.

        If the interval is ``enough_us`` or more, it may be a lower bound instead of exact.
        """
        plan = plan_of(self._base, self.graph, schedule, depth)
        if plan is None:
            return None
        streams = self.graph.streams
        ii_us = interval_us(plan, self._costs, streams=streams, enough_us=enough_us)
        return FoundPlan(schedule, plan, ii_us)

    def together(self, best: FoundPlan, slack: float) -> FoundPlan:
        """Return the plan with tasks of one stage joined on one thread where that is no slower.

        The interval may grow by the fraction ``slack``.
        """
        most_us = best.ii_us * (1 + slack + TOLERANCE)
        parts = sorted(set(zip(best.schedule.stage, best.schedule.thread, strict=True)))
        # Pairs of parts in one stage. The lower thread is the target first, so that work goes to
        # the caller's thread if it can.
        for (stage, target), (other, source) in permutations(parts, 2):
            if stage == other:
                pairs = zip(best.schedule.stage, best.schedule.thread, strict=True)
                moved = [
                    target if (s, k) == (stage, source) and v not in self.graph.frozen else k
                    for v, (s, k) in enumerate(pairs)
                ]
                schedule = replace(best.schedule, thread=tuple(moved))
                if schedule.parts < best.schedule.parts and self._fits(schedule, most_us):
                    tidy = self.simulated(schedule, best.depth)
                    if tidy is not None and tidy.ii_us <= most_us:
                        best = tidy
        return best

    def further_ahead(self, best: FoundPlan) -> FoundPlan:
        """Return the plan with the least ``run_ahead`` that gives the shortest interval."""
        # The schedule stays the same. Only the limit on launches ahead changes, and each value is
        # simulated.
        if self._base.run_ahead is None and self.graph.streams and self.graph.run_ahead is not None:
            for ahead in range(self.graph.run_ahead + 1, MOST_AHEAD + 1):
                plan = replace(best.plan, run_ahead=ahead)
                more = FoundPlan(best.schedule, plan, interval_us(plan, self._costs, streams=True))
                best = more if more.beats(best) else best
        return best

    def _fits(self, schedule: ModuloSchedule, most_us: float) -> bool:
        """Return whether every thread's host work is at most ``most_us``."""
        load = [0.0] * (max(schedule.thread) + 1)
        for thread, host_us in zip(schedule.thread, self.graph.host_us, strict=True):
            load[thread] += host_us
        return max(load) <= most_us
