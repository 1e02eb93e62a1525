"""The moves of the search, which give a task another place in the period, stage or thread.

    order    a  p  x  b        b waits for a, since both want one resource or thread;
                               p comes before b, for b depends on it
    move     p  b  a  x        b goes right before a, and takes p along

Alone, b could not move before p. Every move keeps all dependences: the order stays a topological
order of the dependences of lag 0, and no lag becomes negative.

Source: E. Balas and A. Vazacopoulos, "Guided local search with shifting bottleneck for job shop
scheduling" (Management Science 44, 1998), for moves of a task to an end of a row of tasks that wait
for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.schedule_graph import ScheduleGraph

_TO_THREAD = 0.5
_TO_STAGE = 0.3
"""The probability of a move to another thread, and to another stage.

The rest of the moves change the place in the order.
"""

_TOGETHER = 12
"""The largest number of tasks that one move takes to another stage; more hardly ever gains."""

_DRAWS = 4
"""The number of draws in search of a task that shares a thread or a resource with another."""


class MovableSchedule:
    """A schedule that moves change in place.

    Args:
        graph: The schedule graph of the loop.
        schedule: The initial schedule.
        threads: The number of threads available.
        depth: The number of stages available.
        random: Returns a random number from 0 up to 1, 1 excluded.

    ``order``, ``thread`` and ``stage`` are those of the current schedule.
    """

    def __init__(
        self,
        graph: ScheduleGraph,
        schedule: ModuloSchedule,
        threads: int,
        depth: int,
        random: Callable[[], float],
    ) -> None:
        self._graph = graph
        self._threads = threads
        self._depth = depth
        self._draw = random
        self.order = list(schedule.order)
        self.thread = list(schedule.thread)
        self.stage = list(schedule.stage)
        self._accepted = schedule

    @property
    def schedule(self) -> ModuloSchedule:
        """The current schedule, as an immutable object."""
        return ModuloSchedule(tuple(self.thread), tuple(self.stage), tuple(self.order))

    def keep(self) -> None:
        """Accept the current schedule: ``undo`` returns to it."""
        self._accepted = self.schedule

    def undo(self) -> None:
        """Return to the schedule that was accepted last."""
        self.order[:] = self._accepted.order
        self.thread[:] = self._accepted.thread
        self.stage[:] = self._accepted.stage

    def move(self, task: int, *, to_threads: bool) -> bool:
        """Make a random move of a task. Returns False if there is none; call ``undo`` then."""
        kind = self._draw()
        to_thread = _TO_THREAD if to_threads and self._threads > 1 else 0.0
        if kind < to_thread:
            return self._to_thread(task)
        if kind < to_thread + _TO_STAGE:
            return self._to_stage(task, 1 if self._draw() < 0.5 else -1)
        return self._past_another(task) or self._place([task])

    def _to_thread(self, task: int) -> bool:
        """Move a task to another thread."""
        target = int(self._draw() * self._threads)
        # Frozen tasks stay on the caller's thread.
        if target == self.thread[task] or task in self._graph.frozen:
            return False
        self.thread[task] = target
        return self._place([task])

    def _to_stage(self, task: int, by: int) -> bool:
        """Move a task by one stage, together with the tasks that its dependences force along."""
        graph = self._graph
        stage = self.stage
        # To a later stage, consumers may have to follow; to an earlier one, producers.
        arcs = graph.consumers if by > 0 else graph.producers
        moved = [task]
        # The list grows in the loop: each moved task may force its consumers (or producers) along.
        for v in moved:
            to = stage[v] + by
            if not 0 <= to < self._depth or v in graph.frozen or len(moved) > _TOGETHER:
                return False
            moved += [
                u
                for u, distance in arcs[v]
                # The lag of the dependence would become negative.
                if (stage[u] - to) * by + distance < 0 and u not in moved
            ]
        for v in moved:
            stage[v] += by
        return self._place(moved if by > 0 else moved[::-1])

    def _place(self, tasks: Sequence[int]) -> bool:
        """Find places in the order for tasks, one by one; return False if one has no place."""
        rest = [v for v in self.order if v not in tasks]
        missing = set(tasks)
        for task in tasks:
            low, high = self._room(task, rest, missing)
            if low > high:
                return False
            at = self.order.index(task)
            # Keep the old place in half of the cases, if it is allowed.
            if not low <= at <= high or self._draw() < 0.5:
                at = low + int(self._draw() * (high - low + 1))
            rest.insert(at, task)
            missing.discard(task)
        self.order[:] = rest
        return True

    def _room(self, task: int, order: Sequence[int], missing: set[int]) -> tuple[int, int]:
        """Return the first and the last place that dependences of lag 0 allow for a task."""
        graph = self._graph
        stage = self.stage
        s = self.stage[task]
        low = 0
        high = len(order)
        for p, distance in graph.producers[task]:
            # Tasks in ``missing`` have no place yet; they will be placed relative to this one.
            if s - stage[p] + distance == 0 and p not in missing:
                low = max(low, order.index(p) + 1)
        for c, distance in graph.consumers[task]:
            if stage[c] - s + distance == 0 and c not in missing:
                high = min(high, order.index(c))
        return low, high

    def _past_another(self, task: int) -> bool:
        """Exchange the order of a task and another one that shares a thread or resource with it."""
        # Only the order of tasks that exclude each other affects the interval.
        for _ in range(_DRAWS):
            other = int(self._draw() * len(self.order))
            together = self.thread[task] == self.thread[other]
            if other != task and (together or other in self._graph.sharing[task]):
                places = map(self.order.index, (task, other))
                return self._exchange(*sorted(places))
        return False

    def _exchange(self, low: int, high: int) -> bool:
        """Exchange the tasks at two places; return False if one depends on the other."""
        between = self.order[low : high + 1]
        # The last task goes right before the first, and takes its producers along.
        along = self._with_producers(between[::-1])
        if between[0] in along:
            return False
        # The sort is stable, so the tasks of each part keep their order.
        between.sort(key=lambda v: v not in along)
        self.order[low : high + 1] = between
        return True

    def _with_producers(self, tasks: Sequence[int]) -> set[int]:
        """Return the first of the tasks, and those that dependences of lag 0 tie to it."""
        stage = self.stage
        along = {tasks[0]}
        for task in tasks[1:]:
            for other, distance in self._graph.consumers[task]:
                if other in along and stage[other] - stage[task] + distance == 0:
                    along.add(task)
                    break
        return along
