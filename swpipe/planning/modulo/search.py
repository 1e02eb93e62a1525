"""Modulo scheduling: the least initiation interval that can be found, then the least depth.

    beginnings ──> walk ─────────────> plan ──────> its interval
         ^         rehearsed           layout       simulate  │
         │                                                    │
         └──────── the best so far ───────────────────────────┘

Every plan is an order of the tasks, a thread and a stage for each. A *walk* goes from plan to plan,
a step at a time, led by what some periods take when they are rehearsed. Some walks begin anew,
others from the best plan so far; two go side by side.

The simulator has the last word: threads, queues and back-pressure included. Rehearsals are hardly
ever wrong. So they are trusted until there is a plan to hand out; if that one does not keep what it
promised, that is noted, and the search goes on. Where numba is not there, rehearsals would take as
long as the simulator: then walks go by single periods, and the simulator is asked about every plan
that promises to be better than the best so far. So it is where a plan may be one that cannot be
said: where ``same_period_deps`` reach into later iterations.

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
from typing import NamedTuple

from swpipe._engine.program import compile_plan
from swpipe.core.costs import CostModel
from swpipe.core.errors import InternalError
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.modulo.beginnings import beginning, beginnings
from swpipe.planning.modulo.compiled import COMPILED
from swpipe.planning.modulo.layout import Layout, Schedule, layouts, period_of, plan_of
from swpipe.planning.modulo.loop_graph import SAME, LoopGraph
from swpipe.planning.modulo.pair import Pair
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.sharing import least_load
from swpipe.planning.modulo.walk import Walk
from swpipe.planning.simulation.cycles import Arc, heaviest_cycle, ticks
from swpipe.planning.simulation.simulator import steady_interval

_SMALL = 8
"""Loops of fewer tasks are given as much effort as one of so many."""

_CUTS = 2
"""So many ways to cut a period are judged, those of the least depth."""

_REST = 0.15
"""Of the effort, so much is for depth and threads, and no more; all else is for the interval."""

_MOST_BROKEN = 4
"""After so many broken promises none is trusted any more."""


class _Pace(NamedTuple):
    """How much is done; effort is counted in turns, operations rehearsed or played.

    Attributes:
        effort: For a loop of one task.
        effort_growth: The power of the number of tasks that it grows by.
        most_effort: All in all, for loops of many tasks.
        walk: Steps of a walk, of a loop of one task.
        walk_growth: The power of the number of tasks that they grow by.
        judging: What it takes to judge a plan, for each pair of tasks.
    """

    effort: int
    effort_growth: float
    most_effort: int
    walk: float
    walk_growth: float
    judging: int


PACE = (
    _Pace(5_000, 2.2, 400_000_000, walk=2, walk_growth=1.61, judging=80)
    if COMPILED
    else _Pace(430, 2, 3_600_000, walk=24, walk_growth=1, judging=2)
)
"""What takes a few hundredths of a second for 14 tasks where compiled, and a tenth where not; for
loops of hundreds less than five seconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, and how fast it is.

    Attributes:
        plan: What was found.
        ii_us: Its interval, as the simulator has it, or as it was rehearsed.
        threads: Thread groups, the caller's counted.
        layout: Where tasks stand, of a plan that the simulator has not seen yet.
    """

    plan: PipelinePlan
    ii_us: float
    threads: int
    layout: Layout | None = None

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
        trusts: Whether what a rehearsal says is taken for true, until the end.
        effort: Turns that are left to do; what bounds the time.
        broken: How many promises turned out not to be kept.
    """

    base: PipelinePlan
    costs: CostModel
    graph: LoopGraph
    times: float = 1.0
    trusts: bool = field(init=False)
    effort: float = field(init=False)
    broken: int = field(init=False, default=0)
    _whole: float = field(init=False)
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)
    _cycles: dict[int, float] = field(default_factory=dict)
    _loads: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trusts = COMPILED and all(distance >= 0 for _, _, distance in self.graph.deps)
        self._whole = self.effort = self.times * min(
            PACE.effort * math.pow(max(self.graph.size, _SMALL), PACE.effort_growth),
            PACE.most_effort,
        )

    def bound_us(self, threads: int, depth: int) -> float:
        """No plan with so many threads and iterations in flight is faster."""
        if depth <= max(self.graph.least_stages):
            return math.inf  # there is no such plan
        if depth not in self._cycles:
            self._cycles[depth] = self._cycle_us(depth)
        return max(self._least_load(threads), self.graph.busiest_us, self._cycles[depth])

    def _cycle_us(self, depth: int) -> float:
        """What dependences ask for, and that iterations wait for the one ``depth`` before."""
        n, graph = self.graph.size, self.graph
        begin, end = 2 * n, 2 * n + 1
        arcs = [Arc(e.tail, e.head, ticks(e.time_us), e.distance) for e in graph.edges]
        for v in range(n):
            last = n + v if graph.streams else v
            arcs += [Arc(begin, v, 0, 0), Arc(last, end, ticks(graph.time_us(last)), 0)]
        cycle = heaviest_cycle(2 * n + 2, [*arcs, Arc(end, begin, 0, depth)])
        return cycle.ratio_us if cycle is not None else 0.0

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
        reserve = self.effort * (1 - share)
        if self.trusts:
            return self._promised(wanted_us, threads, depth, math.ceil(self.effort - reserve))
        quest = _Quest(self, wanted_us, threads, depth, reserve)
        quest.walk()
        return quest.best

    def _promised(self, wanted_us: float, threads: int, depth: int, turns: int) -> Found | None:
        """The same, where what plans promise is believed."""
        period, rng = Period(self.graph, threads, depth), self.chance(threads, depth)
        pair = Pair(period, rng, wanted_us, turns)
        pair.search(beginnings(self.graph, depth, threads), self.steps)
        self.effort -= turns - pair.turns
        if pair.best is None:
            return None
        layout, promised_us = pair.best
        return self.trusted(_from_first(layout), depth, promised_us)

    @property
    def steps(self) -> int:
        """How many steps a walk has."""
        return round(PACE.walk * math.pow(self.graph.size, PACE.walk_growth))

    def chance(self, threads: int, depth: int) -> random.Random:
        """What decides; another one once a promise was broken."""
        return random.Random(threads * 1_000 + depth + 1_000_000 * self.broken)

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
            self.effort -= PACE.judging * self.graph.size**2
            ii_us = self.simulated(plan, enough_us)
            if ii_us < enough_us:  # or else it is a bound, and enough for this comparison alone
                self._seen[key] = ii_us
        return Found(plan, ii_us, len({0, *layout.lanes}))

    def simulated(self, plan: PipelinePlan, enough_us: float = math.inf) -> float:
        """The interval of a plan, as the simulator has it."""
        program = compile_plan(resolve_plan(plan), streams=self.graph.streams)
        return steady_interval(
            program, self.costs, streams=self.graph.streams, enough_us=enough_us
        ).ii_us

    def trusted(self, layout: Layout, depth: int, promised_us: float) -> Found | None:
        """The same as ``judged``, from what was promised, unless it is known better."""
        plan = plan_of(self.base, self.graph, layout, depth)
        if plan is None:
            return None
        ii_us = self._seen.get((depth, layout.order, layout.stages, layout.lanes), promised_us)
        return Found(plan, ii_us, len({0, *layout.lanes}), layout)

    def confirmed(self, found: Found) -> Found | None:
        """It, with the simulator's interval; None where it is slower than it promised to be.

        Then the truth is known from there on, and there is some effort to search again.
        """
        if found.layout is None:
            return found
        layout, ii_us = found.layout, self.simulated(found.plan)
        if ii_us <= found.ii_us * (1 + SAME):
            return Found(found.plan, ii_us, found.threads)
        self._seen[found.plan.depth, layout.order, layout.stages, layout.lanes] = ii_us
        self.broken += 1
        self.trusts = self.broken < _MOST_BROKEN
        self.effort = self._whole / 2
        return None


class _Quest:
    """Walks for one interval, with the simulator asked about the plans on the way.

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
        self._wanted_us = wanted_us
        self._walk = Walk(Period(search.graph, threads, depth), search.chance(threads, depth))

    def walk(self) -> None:
        """Walk until satisfied."""
        first = beginning(self._search.graph, self._depth, self._threads)
        number, steps = 0, self._search.steps
        while first is not None and self.turns_left:
            begin = self._best_layout if number % 4 > 1 and self._best_layout else first
            if number % 2 and self._threads > 1:
                begin = self._walk.dealt(begin, self._lowest_us, self._wanted_us) or begin
            self._walk.go(begin, steps, self, lanes_change=number % 2 == 0)
            if number % 4 == 1:
                self._settle()
            number += 1
        self._settle()
        self._search.effort -= self._walk.turns

    @property
    def _left(self) -> int:
        return max(0, math.ceil(self._search.effort - self._walk.turns - self._reserve))

    @property
    def beaten_below_us(self) -> float:
        """Only plans that promise less are of interest."""
        return self._lowest_us * (1 - SAME)

    @property
    def turns_left(self) -> int:
        """How much of the effort is left; none where the interval wanted is found."""
        if self.best is not None and self.best.ii_us <= self._wanted_us * (1 + SAME):
            return 0
        return self._left

    def ask(self, layout: Layout, promised_us: float) -> float:
        """The interval of a plan; what it promises, where finding out can wait."""
        if promised_us > self._wanted_us * (1 + SAME) and self.judging > self._walk.turns:
            self._waiting, self._lowest_us = layout, promised_us
            return promised_us
        return self._judged(layout)

    def _settle(self) -> None:
        if self._waiting is not None:
            self._judged(self._waiting)

    def _judged(self, layout: Layout) -> float:
        best_us = self.best.ii_us if self.best else math.inf
        self.judging += PACE.judging * self._search.graph.size**2
        found = self._search.judged(_from_first(layout), self._depth, best_us * (1 + SAME))
        if found is not None and found.beats(self.best):
            self.best, self._best_layout = found, layout
        self._waiting, self._lowest_us = None, self.best.ii_us if self.best else math.inf
        return found.ii_us if found is not None else math.inf


def _from_first(layout: Layout) -> Layout:
    """The same, its first stage being 0."""
    first = min(layout.stages)
    return replace(layout, stages=tuple(stage - first for stage in layout.stages))
