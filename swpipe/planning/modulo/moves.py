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
from dataclasses import replace

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


class Moves:
    """Random moves, each of which makes another schedule of one that keeps all dependences.

    Args:
        graph: The schedule graph of the loop.
        threads: The number of threads available.
        depth: The number of stages available.
        random: Returns a random number from 0 up to 1, 1 excluded.
    """

    def __init__(
        self, graph: ScheduleGraph, threads: int, depth: int, random: Callable[[], float]
    ) -> None:
        self._graph = graph
        self._threads = threads
        self._depth = depth
        self._draw = random

    def move(
        self, schedule: ModuloSchedule, task: int, *, to_threads: bool
    ) -> ModuloSchedule | None:
        """Return the schedule after a random move of a task; None if there is none."""
        kind = self._draw()
        to_thread = _TO_THREAD if to_threads and self._threads > 1 else 0.0
        if kind < to_thread:
            return self._to_thread(schedule, task)
        if kind < to_thread + _TO_STAGE:
            return self._to_stage(schedule, task, 1 if self._draw() < 0.5 else -1)
        return self._past_another(schedule, task) or self._placed(schedule, [task])

    def _to_thread(self, schedule: ModuloSchedule, task: int) -> ModuloSchedule | None:
        """Move a task to another thread."""
        target = int(self._draw() * self._threads)
        thread = list(schedule.thread)
        # Frozen tasks stay on the caller's thread.
        if target == thread[task] or task in self._graph.frozen:
            return None
        thread[task] = target
        return self._placed(replace(schedule, thread=tuple(thread)), [task])

    def _to_stage(self, schedule: ModuloSchedule, task: int, by: int) -> ModuloSchedule | None:
        """Move a task by one stage, together with the tasks that its dependences force along."""
        graph = self._graph
        stage = list(schedule.stage)
        # To a later stage, consumers may have to follow; to an earlier one, producers.
        arcs = graph.consumers if by > 0 else graph.producers
        moved = [task]
        # The list grows in the loop: each moved task may force its consumers (or producers) along.
        for v in moved:
            to = stage[v] + by
            if not 0 <= to < self._depth or v in graph.frozen or len(moved) > _TOGETHER:
                return None
            moved += [
                u
                for u, distance in arcs[v]
                # The lag of the dependence would become negative.
                if (stage[u] - to) * by + distance < 0 and u not in moved
            ]
        for v in moved:
            stage[v] += by
        after = replace(schedule, stage=tuple(stage))
        return self._placed(after, moved if by > 0 else moved[::-1])

    def _placed(self, schedule: ModuloSchedule, tasks: Sequence[int]) -> ModuloSchedule | None:
        """Find places in the order for tasks, one by one; return None if one has no place."""
        rest = [v for v in schedule.order if v not in tasks]
        missing = set(tasks)
        for task in tasks:
            low, high = self._room(schedule.stage, task, rest, missing)
            if low > high:
                return None
            at = schedule.order.index(task)
            # Keep the old place in half of the cases, if it is allowed.
            if not low <= at <= high or self._draw() < 0.5:
                at = low + int(self._draw() * (high - low + 1))
            rest.insert(at, task)
            missing.discard(task)
        return replace(schedule, order=tuple(rest))

    def _room(
        self, stage: Sequence[int], task: int, order: Sequence[int], missing: set[int]
    ) -> tuple[int, int]:
        """Return the first and the last place that dependences of lag 0 allow for a task."""
        graph = self._graph
        s = stage[task]
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

    def _past_another(self, schedule: ModuloSchedule, task: int) -> ModuloSchedule | None:
        """Exchange the order of a task and another one that shares a thread or resource with it."""
        order = schedule.order
        thread = schedule.thread
        # Only the order of tasks that exclude each other affects the interval.
        for _ in range(_DRAWS):
            # The logarithm of the distance is uniform: near tasks are drawn more often.
            other = order[order.index(task) - int(len(order) ** self._draw())]
            if thread[task] == thread[other] or other in self._graph.sharing[task]:
                return self._exchanged(schedule, *sorted(map(order.index, (task, other))))
        return None

    def _exchanged(self, schedule: ModuloSchedule, low: int, high: int) -> ModuloSchedule | None:
        """Exchange the tasks at two places; return None if one depends on the other."""
        stage = schedule.stage
        order = list(schedule.order)
        between = order[low : high + 1]
        # The last task goes right before the first, and takes along the producers that dependences
        # of lag 0 tie to it.
        along = {between[-1]}
        for task in between[-2::-1]:
            for other, distance in self._graph.consumers[task]:
                if other in along and stage[other] - stage[task] + distance == 0:
                    along.add(task)
                    break
        if between[0] in along:
            return None
        # The sort is stable, so the tasks of each part keep their order.
        order[low : high + 1] = sorted(between, key=lambda v: v not in along)
        return replace(schedule, order=tuple(order))
