"""Places that tasks touch while a pipeline runs, and what messages call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swpipe._tensors.pytree import tensors_in
from swpipe.core.effects import Location
from swpipe.core.task import PipelineTask
from swpipe.errors import Problem
from swpipe.inference.accesses import Access
from swpipe.inference.declared import declared_tensors
from swpipe.inference.recorded_context import attributes
from swpipe.inference.storages import Storages, described
from swpipe.inference.watched_gradients import WatchedGradients


class TaskRun(NamedTuple):
    """One task on one iteration."""

    iteration: int
    task: str


@dataclass(slots=True)
class WatchedPlace:
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
    place: WatchedPlace,
    tasks: Sequence[PipelineTask],
    ctx: Any,
    gradients: WatchedGradients,
    *,
    one_iteration: bool = False,
) -> list[Location]:
    """What messages and ``PipelinePlan.stale`` call a place, the best name first.

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


def told_conflict(location: Location, run: TaskRun, other: TaskRun, problem: Problem) -> Problem:
    """That two runs touched a place whose order the plan does not keep."""
    text = (
        f"check_effects: task {run.task!r} on iteration {run.iteration} touched {location}, which "
        f"{other.task!r} on iteration {other.iteration} touches as well, and the plan does not "
        f"keep their order: {problem.text}. The run may have differed from a serial one already"
    )
    return Problem(text, problem.tasks)
