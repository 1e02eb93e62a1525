"""What the tasks of one run have touched, each access compared with those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swpipe.analysis.validation import refusal
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.inference.accesses import Access
from swpipe.inference.kept_orders import KeptOrders
from swpipe.inference.watched_gradients import WatchedGradients
from swpipe.inference.watched_places import TaskRun, WatchedPlace, locations_of, told_conflict

_MOST_DEAD = 4096
"""How many places are added before those are dropped whose memory or iteration is gone."""


class ComparedPlaces:
    """The places of one run; call it under a lock.

    Args:
        orders: What the plan keeps.
        plan: The plan.
        tasks: Its tasks, in serial order.
        gradients: Those that are compared.
    """

    def __init__(
        self,
        orders: KeptOrders,
        plan: PipelinePlan,
        tasks: Sequence[PipelineTask],
        gradients: WatchedGradients,
    ) -> None:
        self._orders, self._plan, self._tasks = orders, plan, tasks
        self._gradients = gradients
        self._places: dict[tuple[str, int, str], WatchedPlace] = {}
        self._most = _MOST_DEAD

    def __contains__(self, key: tuple[str, int, str]) -> bool:
        return key in self._places

    def place(self, kind: str, number: int, name: str = "") -> WatchedPlace:
        """The place, a new one if nobody has touched it."""
        key = kind, number, name
        if key not in self._places:
            self._places[key] = WatchedPlace(*key)
        return self._places[key]

    def add(self, place: WatchedPlace, run: TaskRun, access: Access, ctx: Any) -> None:
        """Note an access, and compare it with those of other tasks and iterations.

        Raises:
            PlanError: The plan does not keep two conflicting ones in serial order.
        """
        if (run.task, access) not in place.users:
            place.users.add((run.task, access))
            place.ordered &= self._orders.keeps_all(place, run.task, access)
        if not place.ordered:
            for other, how in place.runs.items():
                if access.writes or how.writes:
                    self._compare(place, run, other, ctx)
        place.runs[run] = access
        if len(place.runs) > 4 * self._plan.depth * len(self._tasks):
            place.runs = {r: a for r, a in place.runs.items() if self._may_meet(place, r, run)}

    def _compare(self, place: WatchedPlace, run: TaskRun, other: TaskRun, ctx: Any) -> None:
        first, then = self._orders.serially(run, other)
        distance = then.iteration - first.iteration
        if first == place.maker and distance:
            distance = self._orders.least(first.task, then.task)
        pair = first.task, then.task, distance
        if pair in place.allowed or self._orders.keeps(place, *pair):
            return
        within = run.iteration == other.iteration
        locations = locations_of(place, self._tasks, ctx, self._gradients, one_iteration=within)
        stale = [one for one in locations if one.name in self._plan.stale]
        location = (stale or locations)[0]
        found = [p for p in self._orders.problems(place, location) if {*p.tasks} == {*pair[:2]}]
        found.sort(key=lambda problem: problem.tasks != (then.task, first.task))
        if found:
            raise refusal(self._plan, [told_conflict(location, run, other, found[0])])
        place.allowed.add(pair)

    def _may_meet(self, place: WatchedPlace, run: TaskRun, now: TaskRun) -> bool:
        """Whether a task that runs now, or later, may have to be compared with a run."""
        return run == place.maker or run.iteration >= now.iteration - 2 * self._plan.depth

    def forget(self, now: TaskRun) -> None:
        """Drop the places that no task can touch any more, or has touched of late."""
        if len(self._places) <= self._most:
            return
        for key, place in list(self._places.items()):
            if place.kind == "memory":
                gone = place.reference.expired()
            else:
                gone = not any(self._may_meet(place, run, now) for run in place.runs)
            if gone:
                del self._places[key]
        self._most = 2 * len(self._places) + _MOST_DEAD
