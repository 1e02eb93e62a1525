"""Simulated annealing over modulo schedules, with restarts.

A move that makes the schedule better is taken; one that makes it worse is taken with a probability
that falls with the temperature. The limit on the cost is drawn before the cost is estimated, so
that an estimate can be given up when it is above. Most moves begin with a critical task: one that
sets the interval, or that such a task waits for. No other move can shorten it.

Runs start from simple schedules and from the incumbent, by turns. Every other run starts with tasks
distributed to threads at random, and leaves them there: threads that are to be busy nearly all the
time are hardly ever found by moving one task or two.

The cost is an estimate. When it promises a better interval than that of the incumbent, the best
schedule so far, the simulator is asked. It takes much longer; so it is asked at the end of a run
instead where it has had its share of the time.

Sources: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing" (Science
220, 1983); that moves should begin on the critical path is from E. Nowicki and C. Smutnicki, "A
fast taboo search algorithm for the job shop problem" (Management Science 42, 1996).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.moves import MovableSchedule
from swpipe.planning.modulo.schedule_graph import TOLERANCE
from swpipe.planning.modulo.starts import distributed

_MOVES_PER_TASK = 24
"""Moves of a run."""

_FIRST_TEMPERATURE = 0.5
_LAST_TEMPERATURE = 0.042
"""How much worse a move may be: on average this fraction of the cost, over the number of tasks."""

_CRITICAL = 0.8
"""The probability that a move begins with a critical task."""

_DISTRIBUTIONS = 64
"""So many distributions of the tasks to threads are drawn before a run; the best is taken."""

_SIMULATION = 45
"""A simulation takes as long as so many estimates."""


class Annealer:
    """Anneals schedules of one loop.

    Args:
        estimator: Of the loop, its threads and its depth.
        simulate: The interval of a schedule, as the simulator has it, if it is below the second
            argument; else anything that is not below it.
        goal_us: An interval that ends the search.

    Attributes:
        incumbent: The best schedule simulated so far.
        ii_us: Its interval.
        work: How many operations were estimated so far; a simulation counts as many estimates.
    """

    def __init__(
        self,
        estimator: Estimator,
        simulate: Callable[[ModuloSchedule, float], float],
        goal_us: float,
    ) -> None:
        self.incumbent: ModuloSchedule | None = None
        self.ii_us = math.inf
        self.work = 0
        self._estimator = estimator
        self._simulate = simulate
        self._goal_us = goal_us
        self._rng = random.Random(1_000 * estimator.threads + estimator.depth)
        self._graph = estimator.graph
        self._operations = self._graph.size * (2 if self._graph.streams else 1)
        self._simulating = 0
        self._answers: dict[ModuloSchedule, float] = {}
        self._waiting: ModuloSchedule | None = None
        self._best_estimate_us = math.inf

    @property
    def done(self) -> bool:
        """Whether the goal is reached."""
        return self.ii_us <= self._goal_us * (1 + TOLERANCE)

    def search(self, starts: Sequence[ModuloSchedule], work: float) -> None:
        """Run again and again, until the goal is reached or so much work is done."""
        number = 0
        while starts and not self.done and self.work < work:
            start = starts[number // 4 % len(starts)]
            if number % 4 > 1 and self.incumbent is not None:
                start = self.incumbent
            if number % 2 and self._estimator.threads > 1:
                self.run(self._distributed(start), work, to_threads=False)
            else:
                self.run(start, work)
            number += 1

    def run(self, start: ModuloSchedule, work: float, *, to_threads: bool = True) -> None:
        """One run of annealing, from high temperature to low; or until ``work`` is done in all."""
        graph = self._graph
        estimator = self._estimator
        random = self._rng.random
        moves = _MOVES_PER_TASK * graph.size
        temperature = _FIRST_TEMPERATURE / graph.size
        cooling = (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** (1 / moves)
        here = MovableSchedule(graph, start, estimator.threads, estimator.depth, random)
        cost = self._cost(here, math.inf)
        critical = estimator.critical()
        for _ in range(moves):
            if self.done or self.work >= work:
                break
            temperature *= cooling
            limit = cost * (1 - temperature * math.log(1 - random()))
            tasks = critical if random() < _CRITICAL else range(graph.size)
            self.work += 1
            moved = here.move(tasks[int(random() * len(tasks))], to_threads=to_threads)
            new = self._cost(here, limit) if moved else math.inf
            if not moved or new > limit:  # the limit is infinite after a schedule that is refused
                here.undo()
                continue
            here.keep()
            cost = new
            critical = estimator.critical()
        if self._waiting is not None:
            self._ask(self._waiting)

    def _cost(self, here: MovableSchedule, limit: float) -> float:
        """The estimated cost; and what the estimate promises too much, where that is known."""
        estimator = self._estimator
        self.work += self._operations
        cost = estimator.cost(here.order, here.thread, here.stage, limit)
        if cost > limit or estimator.ii_us >= self._best_estimate_us * (1 - TOLERANCE):
            return cost
        estimate_us = estimator.ii_us
        if 2 * self._simulating > self.work:
            self._waiting = here.schedule
            self._best_estimate_us = estimate_us
            return cost
        return cost + max(0.0, self._ask(here.schedule) - estimate_us)

    def _ask(self, schedule: ModuloSchedule) -> float:
        """The interval as the simulator has it; a better one makes a new incumbent."""
        if schedule not in self._answers:
            self._simulating += _SIMULATION * self._operations
            self.work += _SIMULATION * self._operations
            self._answers[schedule] = self._simulate(schedule, self.ii_us)
        ii_us = self._answers[schedule]
        if ii_us < self.ii_us * (1 - TOLERANCE):
            self.incumbent = schedule
            self.ii_us = ii_us
        self._waiting = None
        self._best_estimate_us = self.ii_us
        return ii_us

    def _distributed(self, start: ModuloSchedule) -> ModuloSchedule:
        """The best of many distributions of the tasks to threads, by their estimate."""
        graph = self._graph
        estimator = self._estimator
        best = start
        best_cost = math.inf
        for _ in range(_DISTRIBUTIONS):
            self.work += graph.size // 4
            most_us = self.ii_us
            if most_us < math.inf:  # with less work on each thread than would do to be better
                most_us -= 0.5 * self._rng.random() * (most_us - self._goal_us)
            thread = distributed(graph, estimator.threads, most_us, self._rng.random)
            if thread is not None:
                self.work += self._operations
                cost = estimator.cost(start.order, thread, start.stage, best_cost)
                if cost < best_cost:
                    best = replace(start, thread=thread)
                    best_cost = cost
        return best
