"""Two walkers of one loop, side by side: first a race from each beginning, then on from the best.

    race     walker 0: from one beginning ──┐
             walker 1: from the next one  ──┴──> what they found; the next two, till all had a go
                                                       │ the best plan, and where it began
    rounds   walker 0: a walk ──┐                      v
             walker 1: a walk ──┴──> the better plan goes to both ──> the next round

Guarantee: the same loop, beginnings and numbers lead to the same plan, whichever walker is faster
and however many cores there are. For each has numbers of its own, nobody writes what both read,
and neither hears what the other found before both are done.

Assumption: what is compiled holds no interpreter lock; otherwise one would wait for the other, and
time would be lost, nothing else. In small loops a walk takes no longer than to have a thread begin
it: there one walks after the other, on the caller's thread. A walk is not interrupted: it takes
some tenths of a second at most, and Ctrl-C is heard right after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.loop_graph import SAME
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.walk import Walk


class _Way(NamedTuple):
    """How a walk begins.

    Attributes:
        anew: From the beginning that won the race; otherwise from the best plan so far.
        deals: With the tasks dealt to threads anew.
    """

    anew: bool
    deals: bool


_ANEW, _ON = _Way(anew=True, deals=False), _Way(anew=False, deals=False)
_ANEW_DEALT, _ON_DEALT = _Way(anew=True, deals=True), _Way(anew=False, deals=True)

_ROUNDS = ((_ANEW_DEALT, _ON), (_ON, _ON_DEALT), (_ANEW, _ON), (_ANEW_DEALT, _ON_DEALT))
"""How the two walk in each round, over and over."""

_RACE = 0.8
"""In the race, walks have this part of their steps."""

_SMALL = 24
"""Loops of fewer tasks are small."""


class Pair:
    """Two walkers of one loop, looking for one interval.

    Args:
        period: The loop.
        rng: What decides.
        wanted_us: The interval wanted.
        turns: So much may be done: operations rehearsed.

    Attributes:
        best: The plan that promises most of all that were found, and what it promises; None where
            none can run.
        turns: What is left of them.
    """

    def __init__(self, period: Period, rng: random.Random, wanted_us: float, turns: int) -> None:
        self.best: tuple[Layout, float] | None = None
        self.turns = turns
        self._wanted_us, self._small = wanted_us, period.graph.size < _SMALL
        self._walks = [
            Walk(period, random.Random(rng.getrandbits(32)), rehearses=True) for _ in range(2)
        ]

    def search(self, beginnings: Iterable[Layout], steps: int) -> None:
        """Walk until a plan promises what is wanted, or all is done that may be.

        Args:
            beginnings: Where to begin; the last stage is the depth - 1.
            steps: Of a walk.
        """
        with ThreadPoolExecutor(len(self._walks)) as pool:
            begun = self._race(pool, beginnings, math.ceil(steps * _RACE))
            for ways in cycle(_ROUNDS):
                if begun is None or self.best is None or self._done:
                    break
                for walk in self._walks:
                    if walk.top_us > self.best[1]:
                        walk.top = self.best
                starts = [(begun if way.anew else None, way.deals) for way in ways]
                self._side_by_side(pool, starts, steps)
                first = min(self._walks, key=lambda walk: walk.top_us)
                if first.top_us < self.best[1]:
                    self.best = first.top

    def _race(self, pool: Executor, beginnings: Iterable[Layout], steps: int) -> Layout | None:
        """Walk from each, as if it were the only one; which led to the best plan, if any did."""
        waiting, begun, least_us = iter(beginnings), None, math.inf
        while not self._done and (starts := list(islice(waiting, len(self._walks)))):
            for walk, start in zip(self._walks, starts, strict=False):
                walk.top = start, math.inf
            self._side_by_side(pool, [(start, False) for start in starts], steps)
            for walk, start in zip(self._walks, starts, strict=False):
                if walk.top_us < least_us:
                    self.best, begun, least_us = walk.top, start, walk.top_us
        return begun

    def _side_by_side(
        self, pool: Executor, starts: Sequence[tuple[Layout | None, bool]], steps: int
    ) -> None:
        """A walk each: from where, None for its best plan so far, and whether tasks are dealt."""
        before = [walk.turns for walk in self._walks]
        most = math.ceil(self.turns / len(self._walks))
        walking = [
            partial(walk.stroll, start, steps, self._wanted_us, most, deals=deals)
            for walk, (start, deals) in zip(self._walks, starts, strict=False)
        ]
        if self._small:
            for walk_on in walking:
                walk_on()
        else:
            for done in [pool.submit(walk_on) for walk_on in walking]:
                done.result()
        self.turns -= sum(walk.turns for walk in self._walks) - sum(before)

    @property
    def _done(self) -> bool:
        reached = self.best is not None and self.best[1] <= self._wanted_us * (1 + SAME)
        return reached or self.turns <= 0
