"""The search for the least interval: annealing with restarts, for one limit after another.

The effort is counted in operations estimated, and not in time: the same input gives the same plan.

Sources: B. R. Rau, "Iterative modulo scheduling" (MICRO-27, 1994), for the lower bound as what to
reach. There, tasks are placed one by one at a fixed interval; here a whole schedule is changed move
by move, and the interval is what comes of it, since threads without an idle moment are hardly ever
filled by placing one by one.
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
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, plan_of, serial_schedule
from swpipe.planning.modulo.schedule_graph import TOLERANCE, ScheduleGraph
from swpipe.planning.modulo.starts import starts
from swpipe.planning.simulation.interval import interval_us

_WORK = 200_000
_WORK_PER_TASK = 35_000
"""The usual effort, in operations estimated: what takes about a second for 14 tasks."""

_MOST_COUNTED = 200
"""More tasks than these do not lengthen a search."""

_LIMITS_SHARE = 0.15
"""The share of the effort that is for lower limits on depth and threads."""

MOST_AHEAD = 3
"""The most that a planner lets the host run ahead, beyond which it hardly ever gains anything."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A schedule, its plan, and the interval that the simulator has for it, in microseconds."""

    schedule: ModuloSchedule
    plan: PipelinePlan
    ii_us: float

    @property
    def depth(self) -> int:
        """Iterations in flight, not counting the one that a thread of its own pulls ahead."""
        return self.plan.depth - (self.plan.pull_group is not None)

    @property
    def ahead(self) -> int:
        """How many iterations the first is ahead of the device's last at most, where limited."""
        return self.plan.depth + (self.plan.launch_limit or 0)

    def beats(self, other: FoundPlan) -> bool:
        """Whether it is better: less interval, then ahead, then threads, then stages parted."""
        if self.ii_us < other.ii_us * (1 - TOLERANCE):
            return True
        if self.ii_us > other.ii_us * (1 + TOLERANCE):
            return False
        mine = self.schedule
        others = other.schedule
        size = (self.ahead, mine.threads, mine.parts)
        return size < (other.ahead, others.threads, others.parts)


class Search:
    """The loop of a plan, searched under several limits, with a multiple of the usual effort."""

    def __init__(
        self, base: PipelinePlan, costs: CostModel, graph: ScheduleGraph, effort: float = 1.0
    ) -> None:
        self.graph = graph
        self._base = base
        self._costs = costs
        self._work = effort * (_WORK + _WORK_PER_TASK * min(graph.size, _MOST_COUNTED))

    def bound_us(self, threads: int, depth: int) -> float:
        """No plan with so many threads and iterations in flight has a shorter interval."""
        if depth <= max(self.graph.least_stages):
            return math.inf  # there is no such plan
        return bounds_of(self.graph, threads, depth).ii_us

    def best(self, threads: int, depth: int) -> FoundPlan:
        """The best plan found with at most so many threads and iterations in flight.

        To be asked for first: it leaves a small share of the effort for lower limits.
        """
        best = self.serial()
        bound_us = self.bound_us(threads, depth)
        if best.ii_us <= bound_us * (1 + TOLERANCE):
            return best
        rest = self._work * _LIMITS_SHARE
        found = self.reach(bound_us, threads, depth, share=1 - _LIMITS_SHARE)
        self._work = rest
        return found if found is not None and found.beats(best) else best

    def reach(self, goal_us: float, threads: int, depth: int, share: float) -> FoundPlan | None:
        """The first plan found that reaches an interval, or else the best one.

        ``share`` is the share of what is left of the effort that may be spent.
        """

        def simulate(schedule: ModuloSchedule, enough_us: float) -> float:
            found = self.simulated(schedule.from_stage_0(), depth, enough_us)
            return math.inf if found is None else found.ii_us

        annealer = Annealer(Estimator(self.graph, threads, depth), simulate, goal_us)
        annealer.search(starts(self.graph, threads, depth), self._work * share)
        self._work -= annealer.work
        if annealer.incumbent is None:
            return None
        return self.simulated(annealer.incumbent.from_stage_0(), depth)

    def serial(self) -> FoundPlan:
        """The plan that overlaps nothing but what the device overlaps by itself."""
        schedule = serial_schedule(self.graph)
        found = self.simulated(schedule, max(schedule.stage) + 1)
        if found is None:
            raise InternalError("the least stages do not say what same_period_deps ask for")
        return found

    def simulated(
        self, schedule: ModuloSchedule, depth: int, enough_us: float = math.inf
    ) -> FoundPlan | None:
        """The plan of a schedule whose first stage is 0; None if it states no same_period_deps.

        An interval of ``enough_us`` or more need not be exact: a lower bound of it will do.
        """
        plan = plan_of(self._base, self.graph, schedule, depth)
        if plan is None:
            return None
        streams = self.graph.streams
        ii_us = interval_us(plan, self._costs, streams=streams, enough_us=enough_us)
        return FoundPlan(schedule, plan, ii_us)

    def together(self, found: FoundPlan, slack: float) -> FoundPlan:
        """The same with tasks of one stage on one thread, where the interval is no longer.

        But for a fraction ``slack`` of it.
        """
        most_us = found.ii_us * (1 + slack + TOLERANCE)
        parts = sorted(set(zip(found.schedule.stage, found.schedule.thread, strict=True)))
        for (stage, target), (other, source) in permutations(parts, 2):  # the caller's is first
            if stage == other:
                pairs = zip(found.schedule.stage, found.schedule.thread, strict=True)
                moved = [
                    target if (s, k) == (stage, source) and v not in self.graph.frozen else k
                    for v, (s, k) in enumerate(pairs)
                ]
                schedule = replace(found.schedule, thread=tuple(moved))
                if schedule.parts < found.schedule.parts and self._fits(schedule, most_us):
                    tidy = self.simulated(schedule, found.depth)
                    if tidy is not None and tidy.ii_us <= most_us:
                        found = tidy
        return found

    def further_ahead(self, found: FoundPlan) -> FoundPlan:
        """The same plan with more ``run_ahead``, as little as gives a shorter interval."""
        if self._base.run_ahead is None and self.graph.streams and self.graph.run_ahead is not None:
            for ahead in range(self.graph.run_ahead + 1, MOST_AHEAD + 1):
                plan = replace(found.plan, run_ahead=ahead)
                more = FoundPlan(found.schedule, plan, interval_us(plan, self._costs, streams=True))
                found = more if more.beats(found) else found
        return found

    def _fits(self, schedule: ModuloSchedule, most_us: float) -> bool:
        """Whether no thread has more work."""
        load = [0.0] * (max(schedule.thread) + 1)
        for thread, host_us in zip(schedule.thread, self.graph.host_us, strict=True):
            load[thread] += host_us
        return max(load) <= most_us
