"""Modulo scheduling: the least initiation interval that can be found, then the least depth.

    beginning ──> walk ───────────> plan ──────> its interval
        ^         period by period  layout       simulate  │
        └──────── the best so far ─────────────────────────┘

Every plan is an order of the tasks, a thread and a stage for each. A *walk* goes from plan to plan,
a task at a time, led by what one period takes when it is played in that order. Where a plan
promises to be better than the best so far, the simulator is asked, and its word counts: threads,
queues and back-pressure included. Some walks begin anew, others from the best plan so far.

The search ends when a plan has the interval wanted, the lower bound at first, or when its effort is
spent. The same input gives the same plan: no clock is involved, and chance is drawn from numbers
that are always the same.

Source: a plan for one period of a loop, overlapping with those before and after it, is a *modulo
schedule* (B. R. Rau, "Iterative modulo scheduling", MICRO-27, 1994). Rau places operations one by
one at a fixed interval; here a whole plan is changed step by step, and the interval is what comes
of it, since threads without an idle moment are hardly ever filled by placing one by one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from swpipe.costs import CostModel
from swpipe.errors import InternalError
from swpipe.plan import PipelinePlan
from swpipe.plans.modulo.beginnings import beginning
from swpipe.plans.modulo.layout import Layout, Schedule, layouts, period_of, plan_of
from swpipe.plans.modulo.loop_graph import LoopGraph
from swpipe.plans.modulo.period import Period
from swpipe.plans.modulo.sharing import least_load, shared_out
from swpipe.plans.modulo.walk import Walk
from swpipe.plans.simulation.cycles import Arc, heaviest_cycle, ticks
from swpipe.plans.simulation.simulate import steady_interval
from swpipe.program import compile_plan

SAME = 1e-9
"""Intervals that differ by less than this part are the same."""

_CUTS = 2
"""So many ways to cut a period are judged, those of the least depth."""

EFFORT = 180
MOST_EFFORT = 7_500
"""Periods played for each task of a loop, and for loops of many tasks all in all."""

_REST = 0.2
"""Of the effort, so much is for depth and threads, and no more; all else is for the interval."""

_WALK = 24
"""Steps of a walk, for each task."""

_JUDGING = 2.0
"""What it takes to judge a plan, in periods played, for each task."""


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

    Args:
        base: The plan that the loop came from.
        costs: What its tasks cost.
        graph: The loop.
        times: How many times the usual effort may be spent.

    Attributes:
        effort: Periods that are left to play; what bounds the time.
    """

    base: PipelinePlan
    costs: CostModel
    graph: LoopGraph
    times: float = 1.0
    effort: float = field(init=False)
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)
    _loads: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.effort = self.times * min(EFFORT * self.graph.size, MOST_EFFORT)

    def bound_us(self, threads: int, depth: int) -> float:
        """No plan with so many threads and iterations in flight is faster."""
        n, graph = self.graph.size, self.graph
        if depth <= max(graph.least_stages):
            return math.inf  # there is no such plan
        host = max(self._least_load(threads), _busiest(graph))
        begin, end = 2 * n, 2 * n + 1
        arcs = [Arc(e.tail, e.head, ticks(e.time_us), e.distance) for e in graph.edges]
        for v in range(n):
            last = n + v if graph.streams else v
            arcs += [Arc(begin, v, 0, 0), Arc(last, end, ticks(graph.time_us(last)), 0)]
        cycle = heaviest_cycle(2 * n + 2, [*arcs, Arc(end, begin, 0, depth)])
        return max(host, cycle.ratio_us if cycle is not None else 0.0)

    def _least_load(self, threads: int) -> float:
        if threads not in self._loads:
            self._loads[threads] = least_load(self.graph, threads)
        return self._loads[threads]

    def best(self, threads: int, depth: int) -> Found:
        """The best plan found with at most so many threads and iterations in flight.

        To be asked for first: it takes most of the effort, and leaves the rest for other limits.
        """
        best = self.serial()
        bound_us = self.bound_us(threads, depth)
        if best.ii_us <= bound_us * (1 + SAME):
            return best
        rest = self.effort * _REST
        found = self.reach(bound_us, threads, depth, share=1 - _REST)
        self.effort = min(self.effort, rest)
        return found if found is not None and found.beats(best) else best

    def reach(self, wanted_us: float, threads: int, depth: int, share: float = 1.0) -> Found | None:
        """The first plan found that has this interval, or else the best one.

        Args:
            wanted_us: What to reach.
            threads: At most.
            depth: Iterations in flight at most.
            share: Of the effort that is left, so much may be spent.
        """
        quest = _Quest(self, wanted_us, threads, depth, self.effort * (1 - share))
        quest.walk()
        return quest.best

    def serial(self) -> Found:
        """The plan that overlaps nothing but what the device overlaps by itself."""
        stages = self.graph.least_stages
        rank = {v: (-stages[v], place) for place, v in enumerate(self.graph.serial)}
        order = period_of(self.graph, stages, rank)
        layout = Layout((0,) * self.graph.size, stages, order, max(stages) + 1)
        found = self.judged(layout, layout.depth)
        if found is None:
            raise InternalError("the least stages do not say what same_period_deps ask for")
        return found

    def realised(self, times: Schedule, depth: int) -> Found | None:
        """The best plan that these start times make, whoever found them."""
        best: Found | None = None
        for layout in layouts(self.graph, times)[:_CUTS]:
            for deep in range(layout.depth, depth + 1):
                found = self.judged(layout, deep)
                if found is not None and found.beats(best):
                    best = found
                if found is None or found.ii_us <= times.period_us * (1 + SAME):
                    break
        return best

    def judged(self, layout: Layout, depth: int, enough_us: float = math.inf) -> Found | None:
        """The plan, and its interval; None where ``same_period_deps`` cannot be said in it.

        Args:
            layout: Where tasks stand.
            depth: Iterations in flight.
            enough_us: An interval of this or more need not be exact: a lower bound of it will do.
        """
        plan = plan_of(self.base, self.graph, layout, depth)
        if plan is None:
            return None
        key = (depth, layout.order, layout.stages, layout.lanes)
        ii_us = self._seen.get(key)
        if ii_us is None:
            self.effort -= _JUDGING * self.graph.size
            program = compile_plan(plan, streams=self.graph.streams)
            ii_us = steady_interval(
                program, self.costs, streams=self.graph.streams, enough_us=enough_us
            ).ii_us
            if ii_us < enough_us:  # or else it is a bound, and enough for this comparison alone
                self._seen[key] = ii_us
        return Found(plan, ii_us, len({0, *layout.lanes}))


class _Quest:
    """Walks for one interval, each from another beginning or from the best plan so far.

    Args:
        search: Pays for them.
        wanted_us: The interval wanted.
        threads: At most.
        depth: Iterations in flight at most.
        reserve: Effort that is to be left.

    Attributes:
        best: The best plan found.
        judging: Effort that went into judging plans: no more than into walks, but for the last.
    """

    def __init__(
        self, search: Search, wanted_us: float, threads: int, depth: int, reserve: float
    ) -> None:
        self.best: Found | None = None
        self._search, self._threads, self._depth, self._reserve = search, threads, depth, reserve
        self._best_layout: Layout | None = None
        self._waiting: Layout | None = None
        self._lowest_us = math.inf
        self.judging = 0.0
        self._rng = random.Random(threads * 1_000 + depth)
        self._wanted_us = wanted_us
        self._period = Period(search.graph, threads, depth)

    @property
    def beaten_below_us(self) -> float:
        """Only plans that promise less are of interest."""
        return self._lowest_us * (1 - SAME)

    @property
    def satisfied(self) -> bool:
        """Whether the interval wanted is found, or the effort spent."""
        if self.best is not None and self.best.ii_us <= self._wanted_us * (1 + SAME):
            return True
        return self._search.effort - self._period.played <= self._reserve

    def walk(self) -> None:
        """Walk until satisfied."""
        number = 0
        while not self.satisfied:
            begin = self._beginning(number)
            if begin is None:
                break
            walk = Walk(self._period, begin, self._rng, lanes_change=number % 3 != 1)
            walk.go(_WALK * self._search.graph.size, self)
            if self._waiting is not None:
                self._judged(self._waiting)
            number += 1
        self._search.effort -= self._period.played

    def _beginning(self, number: int) -> Layout | None:
        """In turn: threads for who comes first, or shared out evenly; or the best plan so far."""
        graph, threads = self._search.graph, self._threads
        if number % 3 == 2 and self._best_layout is not None:
            return self._best_layout
        if number % 3 == 0:
            return beginning(graph, self._depth, threads)
        evenly = shared_out(graph, threads, self._rng if number > 1 else None)
        return beginning(graph, self._depth, evenly)

    def ask(self, layout: Layout, promised_us: float) -> float:
        """The interval of a plan; what it promises, where finding out can wait."""
        if promised_us > self._wanted_us * (1 + SAME) and self.judging > self._period.played:
            self._waiting, self._lowest_us = layout, promised_us
            return promised_us
        return self._judged(layout)

    def _judged(self, layout: Layout) -> float:
        graph, best_us = self._search.graph, self.best.ii_us if self.best else math.inf
        self.judging += _JUDGING * graph.size
        first = min(layout.stages)
        stages = tuple(stage - first for stage in layout.stages)
        found = self._search.judged(
            replace(layout, stages=stages), self._depth, best_us * (1 + SAME)
        )
        if found is None:
            return math.inf
        if found.beats(self.best):
            self.best, self._best_layout = found, layout
        self._waiting, self._lowest_us = None, self.best.ii_us if self.best else math.inf
        return found.ii_us


def _busiest(graph: LoopGraph) -> float:
    load = [0.0] * len(graph.resources)
    for holds in graph.holds:
        for hold in holds:
            load[hold.what] += hold.time_us
    return max(load, default=0.0)
