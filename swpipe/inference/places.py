"""Places that tasks touch while a pipeline runs, each access compared with those before it.

**Any number of iterations.** A task's runs follow each other on one thread and one stream. So an
order that is kept at some distance is kept at every larger one, and of two tasks that touch a state
only the distances 0 and 1 need to be asked, however deep the pipeline is::

    A on i  ->  B on i + 1  ->  B on i + 2  ->  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swpipe._values.context_log import attributes
from swpipe._values.generators import TORCH
from swpipe._values.storages import Storages, described
from swpipe._values.walk import tensors_in
from swpipe.analysis.races import race_problems
from swpipe.analysis.validation import refusal
from swpipe.analysis.verification import VerifiedPlan
from swpipe.core.effects import Effects, Location
from swpipe.core.task import PipelineTask
from swpipe.errors import Problem
from swpipe.inference.states import declared_tensors
from swpipe.inference.watched_gradients import WatchedGradients

_MOST_DEAD = 4096
"""How many places are added before those are dropped whose memory or iteration is gone."""


class Access(NamedTuple):
    """Whether a task reads and writes something."""

    reads: bool = False
    writes: bool = False

    def __or__(self, other: tuple[bool, ...]) -> Access:
        return Access(self.reads or other[0], self.writes or other[1])


READ, WRITE, READ_WRITE = Access(True, False), Access(False, True), Access(True, True)


class TaskRun(NamedTuple):
    """One task on one iteration."""

    iteration: int
    task: str


@dataclass(slots=True)
class Place:
    """Something that several tasks can touch.

    Attributes:
        kind: "memory", "gradient", "attribute" or "generator".
        number: The storage's or generator's, an attribute's iteration, the id of a parameter.
        name: Of the attribute or generator; what the memory was first seen as.
        reference: To the memory, a weak one, or the generator: its number is not used again.
        maker: Who has made the memory, of those who are watched.
        runs: Who touched it in the last iterations, and how.
        users: All who ever did, and how.
        ordered: All of them are kept in order, however many iterations lie between two.
        allowed: Pairs that the plan allows in either order.
    """

    kind: str
    number: int
    name: str = ""
    reference: Any = None
    maker: TaskRun | None = None
    runs: dict[TaskRun, Access] = field(default_factory=dict)
    users: set[tuple[str, Access]] = field(default_factory=set)
    ordered: bool = True
    allowed: set[tuple[str, str, int]] = field(default_factory=set)


def locations_of(
    place: Place,
    tasks: Sequence[PipelineTask],
    ctx: Any,
    gradients: WatchedGradients,
    *,
    one_iteration: bool = False,
) -> list[Location]:
    """Return what messages, ``stale`` and ``newer`` call a place, the best name first.

    ``one_iteration`` says that it was touched in one iteration only, whose context is ``ctx``.
    """
    if place.kind == "attribute":
        return [Location(place.name, False)]
    if place.kind == "generator":
        return [Location(place.name, True)]
    owners = {place.number} if place.kind == "gradient" else gradients.owners(place.number)
    named = {id(tensor): str(io.state) for io, tensor in declared_tensors(tasks)}
    for number in owners:
        shape = described(gradients.parameters[number])
        return [Location(f"the gradient of {named.get(number, f'a parameter ({shape})')}", True)]
    for io, tensor in declared_tensors(tasks):
        if place.number in Storages().of(tensor):
            return [Location(str(io.state), True)]
    name = f"unnamed memory ({place.name})"
    for attribute, value in attributes(ctx).items():
        if any(place.number in Storages().of(tensor) for tensor in tensors_in(value)):
            name = attribute if one_iteration else f"memory of ctx.{attribute}"
    return [Location(name, not one_iteration)]


class KeptOrders:
    """What a plan keeps of the serial order, in every interleaving.

    Args:
        verified: The plan and its tasks.
    """

    def __init__(self, verified: VerifiedPlan) -> None:
        self.verified, self._guaranteed = verified, verified.before
        self._random = frozenset(task.name for task in verified.tasks if task.random)
        self._serial = {task.name: number for number, task in enumerate(verified.tasks)}
        # A pair to the distances between which it begins to be kept: not at the first one.
        self._begins: dict[tuple[str, str, bool], tuple[int, int]] = {}

    def serially(self, one: TaskRun, other: TaskRun) -> tuple[TaskRun, TaskRun]:
        """The two in their serial order."""
        both = sorted((one, other), key=lambda run: (run.iteration, self._serial[run.task]))
        return both[0], both[1]

    def least(self, first: str, then: str) -> int:
        """At how many iterations apart a serial run has ``then`` come next after ``first``."""
        return 0 if self._serial[first] < self._serial[then] else 1

    def keeps(self, place: Place, first: str, then: str, distance: int) -> bool:
        """Whether every interleaving has ``first`` before ``then``, ``distance`` iterations on."""
        depth = self._guaranteed.program.depth
        if distance > depth or (first == then and not distance):
            return True  # only one of the two is in flight
        if place.name == TORCH and {first, then} <= self._random:
            return True  # each is seeded for itself
        attribute = place.kind == "attribute"
        if self._guaranteed.plan.most_workers > 1:  # what is kept need not be kept further apart
            return self._guaranteed.keeps(first, then, distance, attribute=attribute)
        key = (first, then, attribute)
        not_at, at = self._begins.get(key, (-1, depth + 1))
        if not_at < distance < at:
            kept = self._guaranteed.keeps(first, then, distance, attribute=attribute)
            not_at, at = (not_at, distance) if kept else (distance, at)
            self._begins[key] = not_at, at
        return distance >= at

    def keeps_all(self, place: Place, task: str, access: Access) -> bool:
        """Whether a task is kept in serial order with all users of a place, on any iterations."""
        others = [other for other, how in place.users if access.writes or how.writes]
        pairs = [pair for other in others for pair in ((task, other), (other, task))]
        return all(self.keeps(place, *pair, self.least(*pair)) for pair in pairs)

    def problems(self, place: Place, location: Location) -> list[Problem]:
        """Why the plan may not run the users of a place, if the place is called so."""
        users = {name: [how for task, how in place.users if task == name] for name in self._serial}
        effects = {
            name: Effects(
                frozenset([location] if any(how.reads for how in found) else []),
                frozenset([location] if any(how.writes for how in found) else []),
            )
            for name, found in users.items()
        }
        return race_problems(effects, [self._guaranteed])


class ComparedPlaces:
    """What the tasks of one run have touched; call it under a lock.

    Args:
        orders: What the plan keeps.
        gradients: Those that are compared.
    """

    def __init__(self, orders: KeptOrders, gradients: WatchedGradients) -> None:
        self._plan, self._tasks = orders.verified.plan, orders.verified.tasks
        self._orders, self._gradients = orders, gradients
        self._places: dict[tuple[str, int, str], Place] = {}
        self._most = _MOST_DEAD

    def __contains__(self, key: tuple[str, int, str]) -> bool:
        return key in self._places

    def place(self, kind: str, number: int, name: str = "") -> Place:
        """The place, a new one if nobody has touched it."""
        key = kind, number, name
        if key not in self._places:
            self._places[key] = Place(*key)
        return self._places[key]

    def add(self, place: Place, run: TaskRun, access: Access, ctx: Any) -> None:
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

    def _compare(self, place: Place, run: TaskRun, other: TaskRun, ctx: Any) -> None:
        first, then = self._orders.serially(run, other)
        distance = then.iteration - first.iteration
        if first == place.maker and distance:
            distance = self._orders.least(first.task, then.task)
        pair = first.task, then.task, distance
        if pair in place.allowed or self._orders.keeps(place, *pair):
            return
        within = run.iteration == other.iteration
        locations = locations_of(place, self._tasks, ctx, self._gradients, one_iteration=within)
        shifted = self._plan.stale.keys() | self._plan.newer.keys()
        location = next((one for one in locations if one.name in shifted), locations[0])
        found = [p for p in self._orders.problems(place, location) if {*p.tasks} == {*pair[:2]}]
        found.sort(key=lambda problem: problem.tasks != (then.task, first.task))
        if found:
            text = (
                f"check_effects: task {run.task!r} on iteration {run.iteration} touched "
                f"{location}, which {other.task!r} on iteration {other.iteration} touches as well, "
                f"and the plan does not keep their order: {found[0].text}. The run may have "
                "differed from a serial one already"
            )
            raise refusal(self._plan, [Problem(text, found[0].tasks, found[0].terms)])
        place.allowed.add(pair)

    def _may_meet(self, place: Place, run: TaskRun, now: TaskRun) -> bool:
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
