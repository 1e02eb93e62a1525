"""A walk from plan to plan: one task goes elsewhere at each step, as simulated annealing has it.

A step takes a task to another place in the period, with all that has to go along; to another stage;
or to another thread, maybe in exchange for a task from there. Most steps begin with a task that
sets the interval, or that one of those waits for, or turn such a wait round: no other step can
shorten it. A step that makes the plan worse is taken by chance, less and less often as the walk
goes on. How much worse it may be is drawn first, so that finding out can stop as soon as it is
worse than that. Plans are rehearsed where that is compiled; where it is not, that would take too
long, and a single period of each is played instead.

Who takes promises for true strolls, again and again, and has the best plan in the end. Who does not
is asked on the way, about every plan of interest.

Sources: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing" (Science
220, 1983); that only steps on the critical path matter is from E. Nowicki and C. Smutnicki, "A fast
taboo search algorithm for the job shop problem" (Management Science 42, 1996).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from swpipe.planning.modulo.cast import cast_of
from swpipe.planning.modulo.compiled import COMPILED, Whole, reals, whole, wholes
from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.period import Arrangement, Loop, Period, begins
from swpipe.planning.modulo.strolls import HOT, begin, deal, settle, stroll, wander
from swpipe.planning.modulo.walker import (
    FIRST_HEAT,
    LANES,
    PRICE,
    SEEDS,
    TOP,
    TURNS,
    WANTED,
    Ties,
    Walker,
)


class Judge(Protocol):
    """Who is asked whether a plan keeps what it promises."""

    @property
    def beaten_below_us(self) -> float:
        """Plans that promise less are of interest."""

    @property
    def turns_left(self) -> int:
        """So much more may be done; nothing where there is nothing left to look for."""

    def ask(self, layout: Layout, promised_us: float) -> float:
        """The interval of a plan; what it promises, where finding out is not worth it."""


class Walk:
    """Walks in one loop, one after the other.

    Args:
        period: Plays the loop.
        rng: What decides.
        rehearses: Whether plans are rehearsed, or only a period of each played.

    Attributes:
        turns: Operations that were rehearsed or played, all in all: what walks cost.
    """

    def __init__(self, period: Period, rng: random.Random, *, rehearses: bool = COMPILED) -> None:
        n, threads = period.graph.size, period.threads
        self._period, self._draw, self.turns = period, rng, 0
        self._ties, self._cast = _ties(period), cast_of(period.loop)
        place, kept, best, top, first = (
            Arrangement(*(wholes(n) for _ in range(3))) for _ in range(5)
        )
        self._walker = Walker(
            rehearses=rehearses,
            place=place,
            load=reals(threads),
            kept=kept,
            kept_load=reals(threads),
            best=best,
            top=top,
            first=first,
            critical=wholes(2 * n),
            awaited=wholes(n),
            awaiting=wholes(n),
            tasks=wholes(n),
            gone=wholes(n),
            rest=wholes(n),
            seed=wholes(1),
            keys=reals(n),
            counts=wholes(6),
            levels=reals(9),
        )
        self._walker.levels[FIRST_HEAT] = HOT / n * _unlikeness(period.loop)
        self._walker.levels[TOP] = math.inf

    @property
    def here(self) -> Layout:
        """Where the walk is; the last stage is the depth - 1, the first may be above 0."""
        return self._layout(self._walker.place)

    @property
    def top(self) -> tuple[Layout, float]:
        """The plan that promises most of all that was found by strolls, and what it promises.

        Who sets it, has strolls take that for what was found so far.
        """
        return self._layout(self._walker.top), self.top_us

    @top.setter
    def top(self, found: tuple[Layout, float]) -> None:
        layout, self._walker.levels[TOP] = found
        _stand(self._walker.top, layout)

    @property
    def top_us(self) -> float:
        """What that plan promises; infinity where there is none."""
        return float(self._walker.levels[TOP])

    def _layout(self, place: Arrangement) -> Layout:
        order, lanes, stages = (tuple(map(int, each)) for each in place)
        return Layout(lanes, stages, order, self._period.depth)

    def stroll(
        self, start: Layout | None, steps: int, wanted_us: float, turns: int, *, deals: bool
    ) -> None:
        """Walk once; the best plan found, or known before, is at the ``top`` then.

        Args:
            start: Where to begin, the last stage is the depth - 1; None for the best plan so far,
                where there is one.
            steps: How many.
            wanted_us: An interval that ends it.
            turns: So much may be done.
            deals: Whether it begins with a new deal of the tasks to threads, and keeps to that.
        """
        period, walker = self._period, self._walker
        if start is not None:
            _stand(walker.first, start)
        self._draw_seed()
        walker.levels[WANTED], walker.counts[TURNS] = wanted_us, turns
        anew = start is not None
        stroll(period.loop, self._ties, walker, period.left, self._cast, steps, anew, deals)
        self.turns += int(turns - walker.counts[TURNS])

    def dealt(self, start: Layout, top_us: float, wanted_us: float) -> Layout | None:
        """The best of many deals of the tasks to threads; None where none was possible.

        Args:
            start: Has the order and the stages that each is tried with; the last is the depth - 1.
            top_us: What is to be improved on: no thread may have as much work.
            wanted_us: A good part of what there is to gain is to be promised, if that can be.
        """
        loop, played, walker = self._period.loop, self._period.left, self._walker
        _stand(walker.place, start)
        self._draw_seed()
        walker.counts[TURNS] = 0
        us = deal(loop, self._ties, walker, played, self._cast, top_us, wanted_us)
        self.turns -= int(walker.counts[TURNS])
        return self._layout(walker.best) if us < math.inf else None

    def go(self, start: Layout, steps: int, judge: Judge, *, lanes_change: bool) -> None:
        """Take so many steps, or fewer where the judge wants no more.

        Args:
            start: Where to begin; its stages end with the last, the depth - 1.
            steps: How many.
            judge: Is asked about plans of interest.
            lanes_change: Whether tasks may go to other threads.
        """
        period, walker = self._period, self._walker
        loop, played, cast, level = period.loop, period.left, self._cast, walker.levels
        _stand(walker.place, start)
        self._draw_seed()
        walker.counts[LANES], walker.counts[TURNS] = lanes_change and period.threads > 1, 0
        promised_us = begin(loop, walker, played, cast, steps)
        if promised_us < judge.beaten_below_us:
            judge.ask(self.here, promised_us)
        self.turns -= int(walker.counts[TURNS])
        while left := judge.turns_left:
            walker.counts[TURNS] = left
            promised_us = wander(loop, self._ties, walker, played, cast, judge.beaten_below_us)
            self.turns += int(left - walker.counts[TURNS])
            if promised_us == math.inf:
                break
            broken_us = max(0.0, judge.ask(self.here, promised_us) - promised_us)
            settle(loop, walker, played, cast, level[PRICE] + broken_us)

    def _draw_seed(self) -> None:
        self._walker.seed[0] = self._draw.randrange(1, SEEDS)


def _stand(place: Arrangement, layout: Layout) -> None:
    place.order[:], place.lanes[:] = layout.order, layout.lanes
    place.stages[:] = layout.stages


def _unlikeness(loop: Loop) -> float:
    """How much longer than others some tasks are: their root mean square, over their mean."""
    times = [max(us) for us in zip(loop.host_us, loop.device_us, strict=True)]
    mean_us = sum(times) / len(times)
    return math.sqrt(sum(us**2 for us in times) / len(times)) / mean_us if mean_us else 1.0


def _ties(period: Period) -> Ties:
    graph = period.graph
    producers: list[list[tuple[int, int]]] = [[] for _ in range(graph.size)]
    consumers: list[list[tuple[int, int]]] = [[] for _ in range(graph.size)]
    for consumer, producer, distance in graph.deps:
        if consumer != producer:
            producers[consumer].append((producer, distance))
            consumers[producer].append((consumer, distance))
    return Ties(
        frozen=_flags(graph.frozen, graph.size),
        last=_flags(graph.last, graph.size),
        producer_of=begins(producers),
        producer=whole(task for each in producers for task, _ in each),
        producer_distance=whole(distance for each in producers for _, distance in each),
        consumer_of=begins(consumers),
        consumer=whole(task for each in consumers for task, _ in each),
        consumer_distance=whole(distance for each in consumers for _, distance in each),
        shares=_flags(_sharing(period), graph.size**2),
    )


def _flags(marked: Iterable[int], size: int) -> Whole:
    flags = [0] * size
    for number in marked:
        flags[number] = 1
    return whole(flags)


def _sharing(period: Period) -> set[int]:
    """``v * size + w`` for tasks v and w that take the same stream or resource."""
    n = period.graph.size
    users: dict[int, set[int]] = defaultdict(set)
    for operation, holds in enumerate(period.graph.holds):
        for hold in holds:
            users[hold.what].add(operation % n)
    return {v * n + w for tasks in users.values() for v in tasks for w in tasks - {v}}
