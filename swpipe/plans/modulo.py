"""Modulo scheduling: the least initiation interval that can be found, then the least depth.

    candidate interval ──> threads ──> start times ──> cuts ──> plan ──> interval of the plan
       lower bound,        lanes       iterative       layout            simulate
       then upwards

The search begins at the lower bound, and most loops reach it. Where none of the ways to spread the
work and to order the placements does, it goes upwards until a plan is found, and halves the way
back down a few times. What counts is never the candidate, but the interval of the plan itself as
the simulator has it: threads, queues and back-pressure included.

The same input gives the same plan: no clock and no chance is involved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from swpipe.costs import CostModel
from swpipe.errors import InternalError
from swpipe.plan import PipelinePlan
from swpipe.plans.cycles import Arc, heaviest_cycle, ticks
from swpipe.plans.iterative import Schedule, schedule
from swpipe.plans.lanes import lane_choices, least_load
from swpipe.plans.layout import Layout, layouts, plan_of
from swpipe.plans.loop_graph import LoopGraph
from swpipe.plans.simulate import steady_interval
from swpipe.program import compile_plan

SAME = 1e-9
"""Intervals that differ by less than this part are the same."""

_STEPS = (1.0, 1.02, 1.06, 1.15, 1.4, 2.0, 3.0)
"""Candidate intervals above the lower bound, until one is reached."""

_HALVINGS = 4
_NEAR = 1e-3
"""Half the way back is not gone where it is less than this part."""

_BUDGET = 4
"""Placements per task before one look for start times is given up."""

EFFORT = 200
MOST_EFFORT = 12_000
"""Placements per task in all, and for loops of many tasks all in all."""

_VARIANTS = (
    (False, False, 0),
    (True, True, 0),
    (True, True, 1),
    (True, False, 0),
    (True, True, 2),
    (False, True, 0),
    (True, True, 3),
    (False, False, 1),
)
"""Ways to place tasks (snug, anchored, nudge), the most promising first."""

_TRIES, _MANY_TRIES = 3, 8
"""How often to look for start times, for each way to choose threads; often at the bound."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, and how fast it is.

    Attributes:
        plan: What was found.
        ii_us: Its interval, as the simulator has it.
        threads: Thread groups, the caller's counted.
    """

    plan: PipelinePlan
    ii_us: float
    threads: int

    def beats(self, other: Found | None) -> bool:
        """Whether it is better: a shorter interval, then less depth, then fewer threads."""
        if other is None or self.ii_us < other.ii_us * (1 - SAME):
            return True
        if self.ii_us > other.ii_us * (1 + SAME):
            return False
        return (self.plan.depth, self.threads) < (other.plan.depth, other.threads)


@dataclass(slots=True)
class Search:
    """One loop, searched again and again with other limits.

    Attributes:
        base: The plan that the loop came from.
        costs: What its tasks cost.
        graph: The loop.
        effort: Placements of tasks that are left to try; what bounds the time.
    """

    base: PipelinePlan
    costs: CostModel
    graph: LoopGraph
    effort: int = field(init=False)
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.effort = min(EFFORT * self.graph.size, MOST_EFFORT)

    def bound_us(self, threads: int, depth: int) -> float:
        """No plan with so many threads and iterations in flight is faster."""
        n, graph = self.graph.size, self.graph
        if depth <= max(graph.least_stages):
            return math.inf  # there is no such plan
        host = max(sum(graph.host_us) / threads, *graph.host_us, _busiest(graph))
        begin, end = 2 * n, 2 * n + 1
        arcs = [Arc(e.tail, e.head, ticks(e.time_us), e.distance) for e in graph.edges]
        for v in range(n):
            last = n + v if graph.streams else v
            arcs += [Arc(begin, v, 0, 0), Arc(last, end, ticks(graph.time_us(last)), 0)]
        cycle = heaviest_cycle(2 * n + 2, [*arcs, Arc(end, begin, 0, depth)])
        return max(host, cycle.ratio_us if cycle is not None else 0.0)

    def best(self, threads: int, depth: int) -> Found:
        """The best plan found with at most so many threads and iterations in flight."""
        bound_us = self.bound_us(threads, depth)
        full = self.effort
        self.effort = full // 3
        best = self.serial()
        found = self.at(bound_us, threads, depth, _MANY_TRIES)
        if found is not None and found.beats(best):
            best = found
        low, first = bound_us, max(bound_us, least_load(self.graph, threads))
        for step in _STEPS:
            period_us = first * step
            if best.ii_us <= period_us * (1 + SAME):
                break
            self.effort = max(self.effort, full // 6)  # some plan there must be
            found = self.at(period_us, threads, depth, _MANY_TRIES if step == 1.0 else 2)
            if found is not None and found.beats(best):
                best = found
            if best.ii_us > period_us * (1 + SAME):
                low = period_us
        self.effort = full // 2
        for _ in range(_HALVINGS):
            if best.ii_us <= low * (1 + _NEAR):
                break
            middle = (low + best.ii_us) / 2
            found = self.at(middle, threads, depth, _TRIES)
            if found is not None and found.beats(best):
                best = found
            if best.ii_us > middle * (1 + SAME):
                low = middle
        return best

    def at(self, period_us: float, threads: int, depth: int, tries: int = _TRIES) -> Found | None:
        """The best plan from start times at this interval; it may turn out slower, or faster."""
        best: Found | None = None
        for times in self._schedules(period_us, threads, depth, tries):
            for found in self._plans(times, period_us, depth):
                if found.beats(best):
                    best = found
                if found.ii_us <= period_us * (1 + SAME):
                    return best
        return best

    def serial(self) -> Found:
        """The plan that overlaps nothing but what the device overlaps by itself."""
        stages = self.graph.least_stages
        order = sorted(self.graph.serial, key=lambda v: -stages[v])
        layout = Layout((0,) * self.graph.size, stages, tuple(order), max(stages) + 1)
        found = self._found(plan_of(self.base, self.graph, layout, layout.depth), layout.lanes)
        if found is None:
            raise InternalError("the least stages do not say what same_period_deps ask for")
        return found

    def realised(self, times: Schedule, depth: int) -> Found | None:
        """The best plan that these start times make, whoever found them."""
        best: Found | None = None
        for found in self._plans(times, times.period_us, depth):
            best = found if found.beats(best) else best
        return best

    def _schedules(
        self, period_us: float, threads: int, depth: int, tries: int
    ) -> Iterator[Schedule]:
        choices = lane_choices(self.graph, threads, period_us)
        for snug, anchored, nudge in _VARIANTS[:tries]:
            for allowed in choices:
                budget = min(_BUDGET * self.graph.size, self.effort)
                if budget < self.graph.size + 1:
                    return
                times, placements = schedule(
                    self.graph,
                    allowed,
                    period_us,
                    depth,
                    snug=snug,
                    anchored=anchored,
                    nudge=nudge,
                    budget=budget,
                )
                self.effort -= placements
                if times is not None:
                    yield times

    def _plans(self, times: Schedule, period_us: float, depth: int) -> Iterator[Found]:
        """Plans that these start times make, the least depth first."""
        for layout in layouts(self.graph, times)[:3]:
            for deep in range(layout.depth, depth + 1):
                found = self._found(plan_of(self.base, self.graph, layout, deep), layout.lanes)
                if found is not None:
                    yield found
                if found is None or found.ii_us <= period_us * (1 + SAME):
                    break

    def _found(self, plan: PipelinePlan | None, lanes: tuple[int, ...]) -> Found | None:
        if plan is None:
            return None
        key = (
            plan.depth,
            plan.order,
            tuple((e.stage, e.thread_group) for e in plan.schedule.values()),
        )
        if key not in self._seen:
            program = compile_plan(plan, streams=self.graph.streams)
            interval = steady_interval(program, self.costs, streams=self.graph.streams)
            self._seen[key] = interval.ii_us
        return Found(plan, self._seen[key], len({0, *lanes}))


def _busiest(graph: LoopGraph) -> float:
    load = [0.0] * len(graph.resources)
    for holds in graph.holds:
        for hold in holds:
            load[hold.what] += hold.time_us
    return max(load, default=0.0)
