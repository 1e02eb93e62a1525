"""The places that tasks touch while a pipeline runs, and the comparison of their accesses.

**Any number of iterations.** A task's runs follow each other on one thread and one stream. An order
that is kept at some distance is therefore kept at every larger distance. Of two tasks that touch a
state, only the distances 0 and 1 need to be checked, however deep the pipeline is::

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
from swpipe.inference.pruned_dict import PrunedDict
from swpipe.inference.states import declared_tensors
from swpipe.inference.watched_gradients import WatchedGradients


class Access(NamedTuple):
    """The kinds of access of a task to something: reading, writing, or both."""

    reads: bool = False
    writes: bool = False

    def __or__(self, other: tuple[bool, ...]) -> Access:
        return Access(self.reads or other[0], self.writes or other[1])


READ = Access(True, False)
WRITE = Access(False, True)
READ_WRITE = Access(True, True)


class TaskRun(NamedTuple):
    """The run of one task on one iteration."""

    iteration: int
    task: str


@dataclass(slots=True)
class Place:
    """Something that several tasks can touch.

    Attributes:
        kind: "memory", "gradient", "attribute" or "generator".
        number: The number of the storage or generator, the attribute's iteration, or the
            parameter's id.
        name: The name of the attribute or generator; the first description of the memory.
        reference: A weak reference to the memory, or the generator: its number is not used again.
        maker: The watched task that made the memory, and its iteration.
        runs: Task runs of the last iterations that touched the place, and how.
        users: All tasks that ever touched the place, and how.
        ordered: Whether all users are kept in order, however many iterations lie between two.
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


def location_of(
    place: Place,
    tasks: Sequence[PipelineTask],
    ctx: Any,
    gradients: WatchedGradients,
    *,
    one_iteration: bool = False,
) -> Location:
    """Return what messages, ``stale`` and ``newer`` call a place.

    ``one_iteration`` says that the place was touched in one iteration only, whose context is
    ``ctx``.
    """
    if place.kind in ("attribute", "generator"):
        return Location(place.name, place.kind == "generator")
    # From the most specific name to the least: a gradient, a declared state, an attribute of this
    # context, and last the memory's description.
    owners = {place.number} if place.kind == "gradient" else gradients.owners(place.number)
    if owners:
        number = next(iter(owners))
        names = {id(tensor): str(io.state) for _, io, tensor in declared_tensors(tasks)}
        parameter = f"a parameter ({described(gradients.parameters[number])})"
        return Location(f"the gradient of {names.get(number, parameter)}", True)
    for _, io, tensor in declared_tensors(tasks):
        if place.number in Storages().of(tensor):
            return Location(str(io.state), True)
    name = f"unnamed memory ({place.name})"
    for attribute, value in attributes(ctx).items():
        if any(place.number in Storages().of(tensor) for tensor in tensors_in(value)):
            name = attribute if one_iteration else f"memory of ctx.{attribute}"
    return Location(name, not one_iteration)


class KeptOrders:
    """The serial order that a plan keeps in every interleaving.

    Args:
        verified: The plan and its tasks.
    """

    def __init__(self, verified: VerifiedPlan) -> None:
        self.verified = verified
        self._guaranteed = verified.before
        self._random = frozenset(task.name for task in verified.tasks if task.random)
        self._serial = {task.name: number for number, task in enumerate(verified.tasks)}

    def serially(self, *runs: TaskRun) -> list[TaskRun]:
        """Return task runs in their serial order."""
        return sorted(runs, key=lambda run: (run.iteration, self._serial[run.task]))

    def least(self, first: str, then: str) -> int:
        """Return how many iterations after ``first`` a serial run next runs ``then``: 0 or 1."""
        return 0 if self._serial[first] < self._serial[then] else 1

    def keeps(self, place: Place, first: str, then: str, distance: int) -> bool:
        """Return whether ``first`` always comes before ``then``, ``distance`` iterations on.

        The order has to hold in every interleaving.
        """
        if distance > self._guaranteed.program.depth or (first == then and not distance):
            return True  # only one of the two is in flight
        if place.name == TORCH and {first, then} <= self._random:
            return True  # each is seeded for itself
        attribute = place.kind == "attribute"
        return self._guaranteed.keeps(first, then, distance, attribute=attribute)

    def keeps_all(self, place: Place, task: str, access: Access) -> bool:
        """Return whether a task is in serial order with all users of a place, on any iterations."""
        others = [other for other, how in place.users if access.writes or how.writes]
        # Both directions at their least distance: larger distances follow, see the module's
        # docstring.
        pairs = [pair for other in others for pair in ((task, other), (other, task))]
        return all(self.keeps(place, *pair, self.least(*pair)) for pair in pairs)

    def problems(self, place: Place, location: Location) -> list[Problem]:
        """Return why the plan may not run the users of a place, under the place's given name."""
        reads = {task for task, how in place.users if how.reads}
        writes = {task for task, how in place.users if how.writes}
        here = frozenset([location])
        nowhere = frozenset[Location]()
        effects = {
            name: Effects(here if name in reads else nowhere, here if name in writes else nowhere)
            for name in self._serial
        }
        return race_problems(effects, [self._guaranteed])


class ComparedPlaces:
    """The places that the tasks of one run have touched; its methods are called under a lock.

    Args:
        orders: The serial order that the plan keeps.
        gradients: The gradients that are compared.
    """

    def __init__(self, orders: KeptOrders, gradients: WatchedGradients) -> None:
        self._plan = orders.verified.plan
        self._tasks = orders.verified.tasks
        self._orders = orders
        self._gradients = gradients
        self._places = PrunedDict[tuple[str, int, str], Place]()

    def __contains__(self, key: tuple[str, int, str]) -> bool:
        return key in self._places

    def place(self, kind: str, number: int, name: str = "") -> Place:
        """Return a place, which is new if nobody has touched it."""
        key = kind, number, name
        if key not in self._places:
            self._places[key] = Place(*key)
        return self._places[key]

    def add(self, place: Place, run: TaskRun, access: Access, ctx: Any) -> None:
        """Note an access, and compare it with those of other tasks and iterations.

        Raises:
            PlanError: The plan does not keep two conflicting accesses in serial order.
        """
        # In the steady state every task is a known user of an ordered place, and nothing is
        # compared.
        if (run.task, access) not in place.users:
            place.users.add((run.task, access))
            place.ordered &= self._orders.keeps_all(place, run.task, access)
        if not place.ordered:
            for other, how in place.runs.items():
                if access.writes or how.writes:
                    self._compare(place, run, other, ctx)
        place.runs[run] = access
        # Runs that can no longer meet a later one are dropped now and then, not at each access.
        if len(place.runs) > 4 * self._plan.depth * len(self._tasks):
            place.runs = {r: a for r, a in place.runs.items() if self._may_meet(place, r, run)}

    def _compare(self, place: Place, run: TaskRun, other: TaskRun, ctx: Any) -> None:
        """Raise an error if the plan does not keep two runs on a place in serial order."""
        first, then = self._orders.serially(run, other)
        distance = then.iteration - first.iteration
        # Memory that is made anew in each iteration is one state: what counts is the distance in a
        # serial run, not how far apart the two happened to be.
        if first == place.maker and distance:
            distance = self._orders.least(first.task, then.task)
        pair = first.task, then.task, distance
        if pair in place.allowed or self._orders.keeps(place, *pair):
            return
        within = run.iteration == other.iteration
        location = location_of(place, self._tasks, ctx, self._gradients, one_iteration=within)
        problems = [p for p in self._orders.problems(place, location) if {*p.tasks} == {*pair[:2]}]
        problems.sort(key=lambda problem: problem.tasks != (then.task, first.task))
        if problems:
            text = (
                f"check_effects: task {run.task!r} on iteration {run.iteration} touched "
                f"{location}, which {other.task!r} on iteration {other.iteration} touches as well, "
                f"and the plan does not keep their order: {problems[0].text}. The run may have "
                "differed from a serial one already"
            )
            raise refusal(self._plan, [Problem(text, problems[0].tasks, problems[0].terms)])
        place.allowed.add(pair)

    def _may_meet(self, place: Place, run: TaskRun, now: TaskRun) -> bool:
        """Return whether a task that runs now or later may have to be compared with a run."""
        return run == place.maker or run.iteration >= now.iteration - 2 * self._plan.depth

    def forget(self, now: TaskRun) -> None:
        """Drop the places that no task can touch any more, or that no task has touched lately."""

        def gone(place: Place) -> bool:
            if place.kind == "memory":
                return bool(place.reference.expired())
            return not any(self._may_meet(place, run, now) for run in place.runs)

        self._places.prune(gone)
