"""Simulated annealing over modulo schedules, with restarts.

A move that makes the schedule better is accepted. A move that makes it worse is accepted with a
probability that falls with the temperature. The limit on the cost is drawn before the cost is
estimated, so that an estimate can stop as soon as it exceeds the limit. Most moves begin with a
critical task: a task that sets the interval, or that a critical task waits for. No other move can
shorten the interval.

Runs start alternately from a simple schedule and from the incumbent, the best schedule so far.
Every other run starts with a random distribution of tasks to threads, and keeps it: moves of one or
two tasks hardly ever find threads that are busy nearly all the time.

The cost is an estimate. If it promises a better interval than that of the incumbent, the schedule
is simulated. A simulation takes much longer, so no schedule is simulated twice, and simulations get
a part of the work only.

Sources: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing" (Science
220, 1983); E. Nowicki and C. Smutnicki, "A fast taboo search algorithm for the job shop problem"
(Management Science 42, 1996), for moves that begin on the critical path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from swpipe.planning.modulo.estimate import Estimator
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.moves import Moves
from swpipe.planning.modulo.schedule_graph import TOLERANCE
from swpipe.planning.modulo.starts import packed

_MOVES = 6.4
"""The number of moves in a run, divided by the number of tasks to the power of 1.5.

A long loop needs one long run; a short one gains more by restarts.
"""

_FIRST_TEMPERATURE = 0.5
_LAST_TEMPERATURE = 0.042
"""The average accepted increase in cost, as a fraction of the cost, times the number of tasks."""

_CRITICAL = 0.8
"""The probability that a move begins with a critical task."""

_DISTRIBUTIONS = 64
"""The number of random distributions of tasks to threads that are drawn before a run.

The run starts with the best of them, by estimate.
"""

_MIXED = 0.5
"""The fraction by which tasks may count as shorter than they are, to vary their distribution."""

_SIMULATION = 45
"""The time of a simulation, in estimates."""

_PER_SIMULATION = 120
"""The least number of estimates per simulation.

A run through a long loop improves its schedule hundreds of times. If each time were simulated, no
time would be left for moves.
"""


class Annealer:
    """A search by simulated annealing over the schedules of one loop.

    Args:
        estimator: The estimator for the loop, its threads and its depth.
        simulate: Returns the simulated interval of a schedule; infinity if there is no plan of it.
        goal_us: The interval in microseconds that ends the search.

    Attributes:
        incumbent: The best schedule simulated so far.
        ii_us: The interval of the incumbent, in microseconds.
        work: How many operations were estimated so far; a simulation counts as many estimates.
    """

    def __init__(
        self,
        estimator: Estimator,
        simulate: Callable[[ModuloSchedule], float],
        goal_us: float,
    ) -> None:
        self.incumbent: ModuloSchedule | None = None
        self.ii_us = math.inf
        self.work = 0
        self._estimator = estimator
        self._simulate = simulate
        self._goal_us = goal_us
        # A fixed seed for each pair of limits: the same input gives the same plan.
        self._rng = random.Random(1_000 * estimator.threads + estimator.depth)
        graph = estimator.graph
        self._moves = Moves(graph, estimator.threads, estimator.depth, self._rng.random)
        self._operations = graph.size * (2 if graph.streams else 1)
        self._answers: dict[ModuloSchedule, float] = {}

    @property
    def done(self) -> bool:
        """Whether the goal is reached."""
        return self.ii_us <= self._goal_us * (1 + TOLERANCE)

    def search(self, first: ModuloSchedule, work: float) -> None:
        """Repeat annealing runs until the goal is reached or ``work`` operations are estimated."""
        number = 0
        while not self.done and self.work < work:
            # Of four runs, two begin with the first schedule, and two with the incumbent; each once
            # with the given threads and once with random ones.
            start = first if number % 4 < 2 or self.incumbent is None else self.incumbent
            if number % 2 and self._estimator.threads > 1:
                self.run(self._distributed(start), work, to_threads=False)
            else:
                self.run(start, work)
            number += 1

    def run(self, schedule: ModuloSchedule, work: float, *, to_threads: bool = True) -> None:
        """Run one annealing from high to low temperature, or until ``work`` is done in all."""
        estimator = self._estimator
        graph = estimator.graph
        random = self._rng.random
        moves = int(_MOVES * graph.size**1.5)
        temperature = _FIRST_TEMPERATURE / graph.size
        # Geometric cooling: after ``moves`` moves the temperature is the last one.
        cooling = (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** (1 / moves)
        cost = self._cost(schedule, math.inf)
        critical = estimator.critical()
        for _ in range(moves):
            if self.done or self.work >= work:
                break
            temperature *= cooling
            # Metropolis: a cost c is accepted with probability exp(-(c / cost - 1) / temperature).
            # Drawing the limit first is the same, and lets the estimate stop early.
            limit = cost * (1 - temperature * math.log(1 - random()))
            tasks = critical if random() < _CRITICAL else range(graph.size)
            task = tasks[int(random() * len(tasks))]
            self.work += 1
            moved = self._moves.move(schedule, task, to_threads=to_threads)
            if moved is None:
                continue
            moved_cost = self._cost(moved, limit)
            if moved_cost <= limit:
                schedule = moved
                cost = moved_cost
                critical = estimator.critical()
        # The last schedule of a run is nearly its best.
        self._ask(schedule)

    def _cost(self, schedule: ModuloSchedule, limit: float) -> float:
        """Return the estimated cost, plus the known error of the estimate if it was simulated."""
        estimator = self._estimator
        self.work += self._operations
        cost = estimator.cost(schedule, limit)
        estimate_us = estimator.ii_us
        estimates = self.work / self._operations
        is_better = cost <= limit and estimate_us < self.ii_us * (1 - TOLERANCE)
        if not is_better or len(self._answers) * _PER_SIMULATION > estimates:
            return cost
        return cost + max(0.0, self._ask(schedule) - estimate_us)

    def _ask(self, schedule: ModuloSchedule) -> float:
        """Return the simulated interval; a better one makes the schedule the incumbent."""
        if schedule not in self._answers:
            self.work += _SIMULATION * self._operations
            self._answers[schedule] = self._simulate(schedule)
        ii_us = self._answers[schedule]
        if ii_us < self.ii_us * (1 - TOLERANCE):
            self.incumbent = schedule
            self.ii_us = ii_us
        return ii_us

    def _distributed(self, start: ModuloSchedule) -> ModuloSchedule:
        """Return the start with the best of many random distributions of tasks to threads."""
        estimator = self._estimator
        graph = estimator.graph
        best = start
        best_cost = math.inf
        for _ in range(_DISTRIBUTIONS):
            self.work += graph.size // 4
            most_us = self.ii_us
            # A thread with more work than the incumbent's interval cannot lead to a better one. Ask
            # for still less at random, down to the middle between the interval and the goal.
            if most_us < math.inf:
                most_us -= 0.5 * self._rng.random() * (most_us - self._goal_us)
            # Placing the longest tasks first fills threads evenly; the random factor varies it.
            key = [us * (1 - _MIXED * self._rng.random()) for us in graph.host_us]
            tasks = sorted(range(graph.size), key=key.__getitem__, reverse=True)
            thread = packed(
                graph, tasks, estimator.threads, most_us, lambda work: self._rng.choice([*work])
            )
            if thread is not None:
                self.work += self._operations
                schedule = replace(start, thread=thread)
                cost = estimator.cost(schedule, best_cost)
                if cost < best_cost:
                    best = schedule
                    best_cost = cost
        return best
