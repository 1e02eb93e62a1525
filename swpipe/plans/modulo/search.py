"""Modulo scheduling: the least initiation interval that can be found, then the least depth.

    looks ──> threads ──> start times ──> cuts ──> plan ──> interval of the plan
      ^       lanes       iterative       layout            simulate   │
      └───────────────── the best so far, at a shorter interval ───────┘

A *look* is one try to find start times, with a small budget: most that succeed do so after hardly
more placements than there are tasks. *Fresh* looks differ in the threads that tasks may run on, in
the order in which tasks are placed, and in the interval: a little above the one wanted, since a
ring that is full to the brim is hard to fill, while the same order of tasks, found where there is
some room, often runs at the shorter interval all the same. Once there is a plan, every second look
takes its start times, squeezes them towards the interval wanted, and mends what does not fit.

What counts is never the interval tried, but that of the plan itself as the simulator has it:
threads, queues and back-pressure included. The search ends when a plan has the interval wanted, the
lower bound at first, or when its effort is spent.

The same input gives the same plan: no clock is involved, and chance is a function of the look's
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from swpipe.costs import CostModel
from swpipe.errors import InternalError
from swpipe.plan import PipelinePlan
from swpipe.plans.modulo.iterative import Schedule, Slotted, schedule
from swpipe.plans.modulo.lanes import Choice, Way, lane_choices, lane_ways, least_load
from swpipe.plans.modulo.layout import Layout, layouts, period_of, plan_of
from swpipe.plans.modulo.loop_graph import LoopGraph
from swpipe.plans.simulation.cycles import Arc, heaviest_cycle, ticks
from swpipe.plans.simulation.simulate import steady_interval
from swpipe.program import compile_plan

SAME = 1e-9
"""Intervals that differ by less than this part are the same."""

_MORE = (0.1, 0.0, 0.03)
"""Fresh looks try intervals that are longer by these parts than the one wanted."""

_GROWTH = 2.0
"""By so much these parts grow after a round of them, as long as nothing is found."""

_SQUEEZED = (0.0, 0.5, 0.8)
"""Others try intervals that go these parts of the way back from the one wanted to the best."""

_BUDGET = 2.5
"""Placements per task before a look is given up."""

_JUDGING = 3
"""What it takes to judge a plan, in placements per task."""

_SOWING = 0.3
"""What it takes to begin from a seed, in placements per task."""

_CUTS = 2
"""So many ways to cut a period are judged, those of the least depth."""

EFFORT = 280
MOST_EFFORT = 25_000
"""Placements per task in all, and for loops of many tasks all in all."""


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
    effort: float = field(init=False)
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)
    _loops: dict[float, Slotted | None] = field(default_factory=dict)
    _spread: dict[int, list[Way]] = field(default_factory=dict)

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
        best = self.serial()
        bound_us = self.bound_us(threads, depth)
        if best.ii_us <= bound_us * (1 + SAME):
            return best
        found = self.reach(bound_us, threads, depth)
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
        budget = int(_BUDGET * self.graph.size)
        looks = _Looks(self, wanted_us, threads, depth)
        best: Found | None = None
        seed: Schedule | None = None
        while self.effort >= reserve + budget:
            times = looks.fresh() if seed is None or looks.number % 2 else looks.from_(seed, best)
            for found in () if times is None else self._plans(times, depth, best):
                if best is None or found.ii_us <= best.ii_us * (1 + SAME):
                    seed = times
                if found.beats(best):
                    best = found
                if found.ii_us <= wanted_us * (1 + SAME):
                    return best
        return best

    def serial(self) -> Found:
        """The plan that overlaps nothing but what the device overlaps by itself."""
        stages = self.graph.least_stages
        rank = {v: (-stages[v], place) for place, v in enumerate(self.graph.serial)}
        order = period_of(self.graph, stages, rank)
        layout = Layout((0,) * self.graph.size, stages, order, max(stages) + 1)
        found = self._found(plan_of(self.base, self.graph, layout, layout.depth), layout.lanes)
        if found is None:
            raise InternalError("the least stages do not say what same_period_deps ask for")
        return found

    def realised(self, times: Schedule, depth: int) -> Found | None:
        """The best plan that these start times make, whoever found them."""
        best: Found | None = None
        for found in self._plans(times, depth):
            best = found if found.beats(best) else best
        return best

    def slotted(self, period_us: float) -> Slotted | None:
        """The loop at this interval; None where a recurrence is too long for it."""
        if period_us not in self._loops:
            self._loops[period_us] = Slotted.of(self.graph, period_us)
        return self._loops[period_us]

    def ways(self, threads: int) -> list[Way]:
        """Ways to spread the tasks over so many threads."""
        if threads not in self._spread:
            self._spread[threads] = lane_ways(self.graph, threads)
        return self._spread[threads]

    def _plans(self, times: Schedule, depth: int, best: Found | None = None) -> Iterator[Found]:
        """Plans that these start times make, the least depth first; poor ones judged roughly."""
        enough_us = math.inf if best is None else best.ii_us * (1 + SAME)
        for layout in layouts(self.graph, times)[:_CUTS]:
            for deep in range(layout.depth, depth + 1):
                plan = plan_of(self.base, self.graph, layout, deep)
                found = self._found(plan, layout.lanes, enough_us)
                if found is not None:
                    yield found
                if found is None or found.ii_us <= times.period_us * (1 + SAME):
                    break

    def _found(
        self, plan: PipelinePlan | None, lanes: tuple[int, ...], enough_us: float = math.inf
    ) -> Found | None:
        if plan is None:
            return None
        key = (
            plan.depth,
            plan.order,
            tuple((e.stage, e.thread_group) for e in plan.schedule.values()),
        )
        ii_us = self._seen.get(key)
        if ii_us is None:
            self.effort -= _JUDGING * self.graph.size
            program = compile_plan(plan, streams=self.graph.streams)
            ii_us = steady_interval(
                program, self.costs, streams=self.graph.streams, enough_us=enough_us
            ).ii_us
            if ii_us < enough_us:  # or else it is a bound, and enough for this comparison alone
                self._seen[key] = ii_us
        return Found(plan, ii_us, len({0, *lanes}))


class _Looks:
    """Looks for start times, one after the other, each unlike those before.

    Args:
        search: Pays for them.
        wanted_us: The interval wanted.
        threads: At most.
        depth: Iterations in flight at most.

    Attributes:
        number: How many there were.
    """

    def __init__(self, search: Search, wanted_us: float, threads: int, depth: int) -> None:
        self.number = 0
        self._search, self._threads, self._depth = search, threads, depth
        self._ways = search.ways(threads)
        self._first_us = max(wanted_us, least_load(search.graph, self._ways))
        self._fresh = 0
        self._room = 1.0

    def fresh(self) -> Schedule | None:
        """From an empty table."""
        which = self._fresh % len(_MORE)
        self._fresh += 1
        period_us = self._first_us * (1 + self._room * _MORE[which])
        if which == len(_MORE) - 1:
            self._room *= _GROWTH
        choices = self._choices(period_us)
        times = self._look(period_us, choices[self._fresh // 2 % len(choices)], None)
        if times is not None:
            self._room = 1.0
        return times

    def from_(self, seed: Schedule, best: Found | None) -> Schedule | None:
        """From start times of a plan, at an interval between the one wanted and the best."""
        part = _SQUEEZED[self.number // 2 % len(_SQUEEZED)]
        over_us = 0.0 if best is None else max(0.0, best.ii_us - self._first_us)
        period_us = self._first_us + over_us * part
        same = tuple((lane,) for lane in seed.lanes)
        free = self.number // 2 % 2
        return self._look(period_us, self._choices(period_us)[0] if free else same, seed)

    def _choices(self, period_us: float) -> list[Choice]:
        return lane_choices(self._search.graph, self._threads, period_us, self._ways)

    def _look(self, period_us: float, allowed: Choice, seed: Schedule | None) -> Schedule | None:
        search = self._search
        loop = search.slotted(period_us)
        self.number += 1
        search.effort -= 1
        if loop is None:
            return None
        times, placements = schedule(
            loop,
            allowed,
            self._depth,
            anchored=bool(self.number // 2 % 2),
            nudge=self.number - 1,
            seed=seed,
            budget=int(_BUDGET * search.graph.size),
        )
        search.effort -= placements + (0 if seed is None else _SOWING * search.graph.size)
        return times


def _busiest(graph: LoopGraph) -> float:
    load = [0.0] * len(graph.resources)
    for holds in graph.holds:
        for hold in holds:
            load[hold.what] += hold.time_us
    return max(load, default=0.0)
