"""Which uses of a place the plan keeps in serial order, in every interleaving.

**Any number of iterations.** A task's runs follow each other on one thread and one stream. So an
order that is kept at some distance is kept at every larger one, and of two tasks that touch a state
only the distances 0 and 1 need to be asked, however deep the pipeline is::

    A on i  ->  B on i + 1  ->  B on i + 2  ->  ...
"""

from __future__ import annotations

from swpipe._state.generators import TORCH
from swpipe.analysis.races import race_problems
from swpipe.analysis.verification import VerifiedPlan
from swpipe.core.effects import Effects, Location
from swpipe.errors import Problem
from swpipe.inference.accesses import Access
from swpipe.inference.watched_places import TaskRun, WatchedPlace


class KeptOrders:
    """What a plan keeps of the serial order.

    Args:
        verified: The plan and its tasks.
    """

    def __init__(self, verified: VerifiedPlan) -> None:
        self._resolved, self._guaranteed = verified.resolved, verified.before
        self._random = frozenset([task.name for task in verified.tasks if task.random])
        self._serial = {task.name: number for number, task in enumerate(verified.tasks)}
        # A pair to the distances between which it begins to be kept: not at the first one.
        self._begins: dict[tuple[str, str], tuple[int, int]] = {}

    def serially(self, one: TaskRun, other: TaskRun) -> tuple[TaskRun, TaskRun]:
        """The two in their serial order."""
        both = sorted((one, other), key=lambda run: (run.iteration, self._serial[run.task]))
        return both[0], both[1]

    def least(self, first: str, then: str) -> int:
        """At how many iterations apart a serial run has ``then`` come next after ``first``."""
        return 0 if self._serial[first] < self._serial[then] else 1

    def keeps(self, place: WatchedPlace, first: str, then: str, distance: int) -> bool:
        """Whether every interleaving has ``first`` before ``then``, ``distance`` iterations on."""
        depth = self._resolved.plan.depth
        if distance > depth or (first == then and not distance):
            return True  # only one of the two is in flight
        if place.name == TORCH and {first, then} <= self._random:
            return True  # each is seeded for itself
        not_at, at = self._begins.get((first, then), (-1, depth + 1))
        if not_at < distance < at:
            kept = self._guaranteed.keeps(first, then, distance)
            not_at, at = (not_at, distance) if kept else (distance, at)
            self._begins[first, then] = not_at, at
        return distance >= at

    def keeps_all(self, place: WatchedPlace, task: str, access: Access) -> bool:
        """Whether a task is kept in serial order with all users of a place, on any iterations."""
        others = [other for other, how in place.users if access.writes or how.writes]
        pairs = [pair for other in others for pair in ((task, other), (other, task))]
        return all(self.keeps(place, *pair, self.least(*pair)) for pair in pairs)

    def problems(self, place: WatchedPlace, location: Location) -> list[Problem]:
        """Why the plan may not run the users of a place, if the place is called so."""
        users = {name: [how for task, how in place.users if task == name] for name in self._serial}
        effects = {
            name: Effects(
                frozenset([location] if any(how.reads for how in found) else []),
                frozenset([location] if any(how.writes for how in found) else []),
            )
            for name, found in users.items()
        }
        return race_problems(self._resolved, effects, guaranteed=[self._guaranteed])
