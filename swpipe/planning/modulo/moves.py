"""The moves of the search: a task takes another place in the period, another stage or thread.

    order    a  p  x  b        b waits for a, since both want one resource or thread;
                               p comes before b, for b depends on it
    moves    p  b  a  x        b goes right before a, and takes p along
             p  x  b  a        a goes right after b, and takes along what depends on it

Alone, b would get no further than p. Every move keeps all dependences: the order stays a
topological order of those of lag 0, and no lag becomes negative.

Source: moving a task to either end of a row of tasks that wait for each other is from E. Balas and
A. Vazacopoulos, "Guided local search with shifting bottleneck for job shop scheduling" (Management
Science 44, 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.schedule_graph import ScheduleGraph

_TO_THREAD = 0.5
_TO_STAGE = 0.3
"""The probability that a move tries another thread; another stage. Else it tries another place."""

_TOGETHER = 12
"""A move takes so many tasks to another stage together at most: more hardly ever gain anything."""

_DRAWS = 4
"""So many tasks are drawn to find one that shares a thread or a resource with another."""


class MovableSchedule:
    """A schedule that moves change in place.

    Args:
        graph: The loop.
        schedule: Where it begins.
        threads: How many there may be.
        depth: How many stages there may be.
        random: Draws a number from 0 up to 1.

    ``order``, ``thread`` and ``stage`` are those of the schedule as it stands.
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
        self._kept = (schedule.order, schedule.thread, schedule.stage)

    @property
    def schedule(self) -> ModuloSchedule:
        """The schedule as it stands."""
        return ModuloSchedule(tuple(self.thread), tuple(self.stage), tuple(self.order))

    def keep(self) -> None:
        """Make the schedule as it stands the one that ``undo`` goes back to."""
        self._kept = (tuple(self.order), tuple(self.thread), tuple(self.stage))

    def undo(self) -> None:
        """Go back to what was kept last."""
        self.order[:], self.thread[:], self.stage[:] = self._kept

    def move(self, task: int, *, to_threads: bool) -> bool:
        """Draw a move of a task and make it; False where there is none, to be undone."""
        kind = self._draw()
        to_thread = _TO_THREAD if to_threads and self._threads > 1 else 0.0
        if kind < to_thread:
            return self._to_thread(task)
        if kind < to_thread + _TO_STAGE:
            return self._to_stage(task, 1 if self._draw() < 0.5 else -1)
        return self._past_another(task)

    # ------------------------------------------------------------------ thread

    def _to_thread(self, task: int) -> bool:
        """Move a task to another thread, in half of the cases in exchange for one from there."""
        frozen = self._graph.frozen
        thread = self.thread
        partner = -1
        target = int(self._draw() * self._threads)
        if self._draw() < 0.5:
            partner = int(self._draw() * len(thread))
            target = thread[partner]
        if target == thread[task] or task in frozen or partner in frozen:
            return False
        if partner >= 0:
            thread[partner] = thread[task]
        thread[task] = target
        return self._place([task])

    # ------------------------------------------------------------------- stage

    def _to_stage(self, task: int, by: int) -> bool:
        """Move a task a stage on or back, and all tasks that dependences take along."""
        graph = self._graph
        stage = self.stage
        arcs = graph.consumers if by > 0 else graph.producers
        moved = [task]
        for v in moved:  # grows meanwhile
            to = stage[v] + by
            if not 0 <= to < self._depth or v in graph.frozen or len(moved) > _TOGETHER:
                return False
            moved += [
                u
                for u, distance in arcs[v]
                if (stage[u] - to) * by + distance < 0 and u not in moved
            ]
        for v in moved:
            stage[v] += by
        return self._place(moved if by > 0 else moved[::-1])

    def _place(self, tasks: Sequence[int]) -> bool:
        """Find places in the order for tasks, one after the other; False where one has none."""
        rest = [v for v in self.order if v not in tasks]
        missing = set(tasks)
        for task in tasks:
            low, high = self._room(task, rest, missing)
            if low > high:
                return False
            at = self.order.index(task)
            if not low <= at <= high or self._draw() < 0.5:
                beside = self._sharing_place(task, rest)
                at = min(max(beside + (self._draw() < 0.5), low), high)
            rest.insert(at, task)
            missing.discard(task)
        self.order[:] = rest
        return True

    def _room(self, task: int, order: Sequence[int], missing: set[int]) -> tuple[int, int]:
        """The first and the last place that dependences of lag 0 leave to a task."""
        graph = self._graph
        stage = self.stage
        s = self.stage[task]
        low = 0
        high = len(order)
        for p, distance in graph.producers[task]:
            if s - stage[p] + distance == 0 and p not in missing:
                low = max(low, order.index(p) + 1)
        for c, distance in graph.consumers[task]:
            if stage[c] - s + distance == 0 and c not in missing:
                high = min(high, order.index(c))
        return low, high

    def _sharing_place(self, task: int, order: Sequence[int]) -> int:
        """The place of a task that shares something with this one, if one is drawn soon."""
        place = 0
        for _ in range(_DRAWS if order else 0):
            place = int(self._draw() * len(order))
            if self._share(task, order[place]):
                break
        return place

    # ------------------------------------------------------------------- order

    def _past_another(self, task: int) -> bool:
        """Put a task, and one that shares something with it, the other way round."""
        for _ in range(_DRAWS):
            other = int(self._draw() * len(self.order))
            if other != task and self._share(task, other):
                places = self.order.index(task), self.order.index(other)
                return self._exchange(min(places), max(places))
        return False

    def _share(self, task: int, other: int) -> bool:
        """Whether two tasks take turns: on a thread or a resource."""
        return self.thread[task] == self.thread[other] or other in self._graph.sharing[task]

    def _exchange(self, low: int, high: int) -> bool:
        """Put the tasks at two places the other way round; False where one needs the other."""
        between = self.order[low : high + 1]
        onward = self._draw() < 0.5
        if onward:  # the first goes right after the last
            along = self._along(between, self._graph.producers)
        else:  # the last goes right before the first
            along = self._along(between[::-1], self._graph.consumers)
        if between[-1 if onward else 0] in along:
            return False
        between.sort(key=lambda v: (v in along) == onward)
        self.order[low : high + 1] = between
        return True

    def _along(self, tasks: Sequence[int], arcs: Sequence[Iterable[tuple[int, int]]]) -> set[int]:
        """The first of the tasks, and those that dependences of lag 0 take along with it."""
        stage = self.stage
        found = {tasks[0]}
        way = 1 if arcs is self._graph.producers else -1
        for task in tasks[1:]:
            for other, distance in arcs[task]:
                if other in found and (stage[task] - stage[other]) * way + distance == 0:
                    found.add(task)
                    break
        return found
