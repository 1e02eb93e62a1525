"""A walk from plan to plan: one task goes elsewhere at each step, as simulated annealing has it.

A step takes a task to another place in the period, to another stage, or to another thread, maybe in
exchange for a task from there. Most steps begin with a task that sets the interval, or that one of
those waits for: no other step can shorten it. A step that makes the plan worse is taken by chance,
less and less often as the walk goes on. How much worse it may be is drawn first, so that playing
the period can stop as soon as it is worse than that.

Sources: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing" (Science
220, 1983); that only steps on the critical path matter is from E. Nowicki and C. Smutnicki, "A fast
taboo search algorithm for the job shop problem" (Management Science 42, 1996).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from swpipe.plans.modulo.layout import Layout
from swpipe.plans.modulo.period import Period

_CRITICAL = 0.8
"""Of the steps, so many begin with a task that sets the interval."""

_STAGE = 0.3
"""Of the steps, so many try another stage."""

_LANE = 0.4
"""Of the steps, so many try another thread, where that is meant to change."""

_NEIGHBOURS = 4
"""Draws of a task that shares something, to go beside."""

_HOT, _COLD = 0.84, 0.042
"""What a step may cost at first and at last: parts of the interval, over the number of tasks."""


class _Step(NamedTuple):
    """Tasks go to other stages, or one of them to another thread, maybe in exchange for another.

    Attributes:
        tasks: Those that are placed anew, the one that is meant first.
        by: Stages that they go on.
        lane: The first one's thread.
        partner: It goes to the thread that the first one leaves; -1 for none.
    """

    tasks: tuple[int, ...]
    by: int
    lane: int
    partner: int = -1


class Judge(Protocol):
    """Who is asked whether a plan keeps what it promises."""

    @property
    def beaten_below_us(self) -> float:
        """Only plans that promise less are of interest."""

    @property
    def satisfied(self) -> bool:
        """Whether there is nothing left to look for."""

    def ask(self, layout: Layout, promised_us: float) -> float:
        """The interval of a plan; what it promises, where finding out is not worth it."""


class Walk:
    """A walk that begins with one plan.

    Args:
        period: Plays the loop.
        begin: Where to begin; its stages end with the last, the depth - 1.
        rng: What decides.
        lanes_change: Whether tasks may go to other threads.
    """

    def __init__(
        self, period: Period, begin: Layout, rng: random.Random, *, lanes_change: bool
    ) -> None:
        graph = period.graph
        self._period, self._graph, self._draw = period, graph, rng.random
        self._order, self._lanes = list(begin.order), list(begin.lanes)
        self._stages = list(begin.stages)
        self._lane_part = _LANE if lanes_change and period.threads > 1 else 0.0
        self._load = [0.0] * period.threads
        for v, lane in enumerate(begin.lanes):
            self._load[lane] += graph.host_us[v]
        self._into: list[list[tuple[int, int]]] = [[] for _ in range(graph.size)]
        self._out: list[list[tuple[int, int]]] = [[] for _ in range(graph.size)]
        for consumer, producer, distance in graph.deps:
            if consumer != producer:
                self._into[consumer].append((producer, distance))
                self._out[producer].append((consumer, distance))
        self._shares = _sharing(period)

    @property
    def here(self) -> Layout:
        """Where the walk is; the last stage is the depth - 1, the first may be above 0."""
        stages, order = tuple(self._stages), tuple(self._order)
        return Layout(tuple(self._lanes), stages, order, self._period.depth)

    def go(self, steps: int, judge: Judge) -> None:
        """Take so many steps, or fewer where the judge is satisfied."""
        period = self._period
        cost = period.play(self._order, self._lanes, self._stages)
        judge.ask(self.here, period.us)
        critical = period.critical()
        heat = _HOT / self._graph.size
        cooling = (_COLD / _HOT) ** (1 / steps)
        for _ in range(steps):
            if judge.satisfied:
                break
            heat *= cooling
            limit = cost * (1 - heat * math.log(1 - self._draw()))
            step = self._step(critical, limit)
            if step is None:
                continue
            before, back = self._order, self._take(step)
            order = self._reordered(step, back)
            if order is None:
                self._take(back)
                continue
            self._order = order
            price = period.play(order, self._lanes, self._stages, limit)
            if price <= limit and period.us < judge.beaten_below_us:
                price += max(0.0, judge.ask(self.here, period.us) - period.us)
            if price <= limit:
                cost, critical = price, period.critical()
            else:
                self._order = before
                self._take(back)

    # ------------------------------------------------------------------ steps

    def _step(self, critical: Sequence[int], limit_us: float) -> _Step | None:
        """A step at random; None for one that leads nowhere."""
        draw = self._draw
        if draw() < _CRITICAL:
            task = critical[int(draw() * len(critical))]
        else:
            task = int(draw() * self._graph.size)
        kind = draw()
        if kind < self._lane_part:
            return self._other_lane(task, limit_us)
        tasks, by = [task], 0
        if kind < self._lane_part + _STAGE:
            by = 1 if draw() < 0.5 else -1
            tasks = self._pushed(task, by)
        return _Step(tuple(tasks), by, self._lanes[task]) if tasks else None

    def _other_lane(self, task: int, limit_us: float) -> _Step | None:
        graph, lanes, load = self._graph, self._lanes, self._load
        partner = -1
        lane = int(self._draw() * len(load))
        if self._draw() < 0.5:
            partner = int(self._draw() * graph.size)
            lane = lanes[partner]
        if lane == lanes[task] or task in graph.frozen or partner in graph.frozen:
            return None
        more_us = graph.host_us[task] - (graph.host_us[partner] if partner >= 0 else 0.0)
        if max(load[lane] + more_us, load[lanes[task]] - more_us) > limit_us:
            return None
        return _Step((task,), 0, lane, partner)

    def _pushed(self, task: int, by: int) -> list[int]:
        """The tasks that go a stage on with one, or back; none where that cannot be."""
        stages, depth = self._stages, self._period.depth
        tasks = [task]
        for v in tasks:  # grows meanwhile
            stage = stages[v] + by
            if not 0 <= stage < depth or v in self._graph.last:
                return []
            for u, distance in self._out[v] if by > 0 else self._into[v]:
                if (stages[u] - stage) * by + distance < 0 and u not in tasks:
                    tasks.append(u)
        return tasks

    def _reordered(self, step: _Step, back: _Step) -> list[int] | None:
        """The order after a step: tasks beside others that share something with them."""
        order = self._order
        changed = step.by != 0 or step.lane != back.lane
        gone = set(step.tasks)
        rest = [v for v in order if v not in gone]
        for moved in step.tasks if step.by >= 0 else reversed(step.tasks):
            low, high = self._between(moved, rest, gone)
            if low > high:
                return None
            at = order.index(moved)
            if not (changed and low <= at <= high and self._draw() < 0.5):
                place = min(max(self._beside(moved, step.lane, rest), low), high)
                if place == at and not changed:
                    return None
                at = place
            rest.insert(at, moved)
            gone.discard(moved)
        return rest

    def _between(self, task: int, rest: Sequence[int], gone: set[int]) -> tuple[int, int]:
        """The first and the last place that dependences within the period leave to a task."""
        stages, stage = self._stages, self._stages[task]
        low, high = 0, len(rest)
        for producer, distance in self._into[task]:
            if stage - stages[producer] + distance == 0 and producer not in gone:
                low = max(low, rest.index(producer) + 1)
        for consumer, distance in self._out[task]:
            if stages[consumer] - stage + distance == 0 and consumer not in gone:
                high = min(high, rest.index(consumer))
        return low, high

    def _beside(self, task: int, lane: int, rest: Sequence[int]) -> int:
        shares, place = self._shares[task], 0
        for _ in range(_NEIGHBOURS):
            place = int(self._draw() * len(rest)) if rest else 0
            if rest and (self._lanes[rest[place]] == lane or rest[place] in shares):
                break
        return place + (self._draw() < 0.5)

    def _take(self, step: _Step) -> _Step:
        """Go to other lanes and stages; the step that leads back."""
        task = step.tasks[0]
        back = _Step(step.tasks, -step.by, self._lanes[task], step.partner)
        if step.by:
            for v in step.tasks:
                self._stages[v] += step.by
        if step.lane != back.lane:
            self._move(task, step.lane)
            if step.partner >= 0:
                self._move(step.partner, back.lane)
        return back

    def _move(self, task: int, lane: int) -> None:
        host_us = self._graph.host_us[task]
        self._load[self._lanes[task]] -= host_us
        self._load[lane] += host_us
        self._lanes[task] = lane


def _sharing(period: Period) -> list[set[int]]:
    """Task to those that take the same stream or resource."""
    graph = period.graph
    users: dict[int, set[int]] = defaultdict(set)
    for operation, holds in enumerate(graph.holds):
        for hold in holds:
            users[hold.what].add(operation % graph.size)
    shares: list[set[int]] = [set() for _ in range(graph.size)]
    for tasks in users.values():
        for task in tasks:
            shares[task] |= tasks - {task}
    return shares
