"""What of a loop may run ahead of its body: the loader, and tasks.

the loader    unless it uses what a task changes, or a task what it changes, or a task modifies
              batches that it keeps, or only the thread that made it can use it, or both may draw
a task        unless it uses what a task or the body may train, or comes after one that does
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swpipe._state.kinds import is_array
from swpipe._state.reached import PlaceId, Reach
from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.inference import Recording
from swpipe.inference.loader_code import LOADER
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tuning.loader_changes import LoaderChanges
from swpipe.tuning.loader_parts import bound_to_thread, keeps, may_draw

_GROUP = "loader"

_HAND_OVER = PipelineTask("hand over", lambda ctx: None)
"""On the caller's thread, where all other tasks run ahead."""


@dataclass(frozen=True)
class Overlap:
    """What runs ahead, and why the rest does not.

    Attributes:
        plan: The plan.
        ahead: Names of the tasks that run ahead of the others.
        loader_ahead: Whether the loader does.
        why: Sentences on what does not.
        recording: What the tasks touch.
    """

    plan: PipelinePlan
    ahead: tuple[str, ...]
    loader_ahead: bool
    why: tuple[str, ...]
    recording: Recording

    def __str__(self) -> str:
        names = [*([LOADER] if self.loader_ahead else []), *self.ahead]
        return "\n".join([f"ahead: {listed(names) if names else 'nothing'}", *self.why])


def choose(
    recorded: Recording,
    tasks: Sequence[PipelineTask],
    reaches: Mapping[str, Reach],
    loader: LoaderChanges,
    batch: Any,
) -> Overlap:
    """What runs ahead.

    Args:
        recorded: What tasks and loader touch.
        tasks: The tasks, in serial order.
        reaches: Task to what its code can reach.
        loader: What the first batch has shown of the loader.
        batch: The first batch.
    """
    effects = {name: touched for name, touched in recorded.effects.items() if name != LOADER}
    recording = replace(recorded, tasks=tuple(tasks), effects=effects)
    why = (
        *_shared(recorded.effects[LOADER], effects),
        *_modified_batches(recorded, loader.reach, batch),
        *why_loader_waits(tasks, reaches, effects, loader),
    )
    if why:
        return serial(recording, why)
    ahead, reasons = _stateless(recording, reaches)
    compute = [name for name in effects if name not in ahead]
    if not compute:  # the body of the loop is what they run ahead of
        compute = [_HAND_OVER.name]
        effects = {**effects, _HAND_OVER.name: Effects()}
        recording = replace(recording, tasks=(*tasks, _HAND_OVER), effects=effects)
    if ahead:
        plan = prefetch_plan(ahead, compute, pull_group=_GROUP)
    else:
        plan = replace(PipelinePlan.serial(tasks), pull_group=_GROUP, pipeline_depth=None)
    return Overlap(plan, ahead, True, tuple(reasons), recording)


def serial(recording: Recording, why: tuple[str, ...]) -> Overlap:
    """Nothing runs ahead."""
    tasks = [task for task in recording.tasks if task is not _HAND_OVER]
    effects = {task.name: recording.effects[task.name] for task in tasks}
    recording = replace(recording, tasks=tuple(tasks), effects=effects)
    return Overlap(PipelinePlan.serial(tasks), (), False, why, recording)


def _shared(own: Effects, effects: EffectTable) -> Iterator[str]:
    """What a task changes and the loader can use, or the loader's code changes and a task can use.

    Of the loader it is assumed that it changes Python values that its code assigns to.
    """
    places, changed = own.reads | own.writes, own.writes - own.assumed
    for name, touched in effects.items():
        both = (touched.writes & places) | (touched.reads & changed)
        if shared := {place for place in both if place.persistent}:
            yield (
                f"The loader and {name!r} may both use {_listed(shared)}, so a batch is pulled "
                "after it."
            )


def why_loader_waits(
    tasks: Sequence[PipelineTask],
    reaches: Mapping[str, Reach],
    effects: EffectTable,
    loader: LoaderChanges,
) -> Iterator[str]:
    """Why the loader does not run ahead, by what the code can reach; ``effects`` for what draws."""
    yield from _changed(loader, reaches_of_undeclared(tasks, reaches))
    yield from _shared_arrays(loader.reach, reaches)
    yield from _draws(effects, loader.draws)
    yield from _bound(loader.reach)


def reaches_of_undeclared(
    tasks: Sequence[PipelineTask], reaches: Mapping[str, Reach]
) -> dict[str, Reach]:
    """Those of tasks that declare no state: the others are taken at their word."""
    return {one.name: reaches[one.name] for one in tasks if not any(io.state for io in one.io)}


def _changed(loader: LoaderChanges, reaches: Mapping[str, Reach]) -> Iterator[str]:
    """What the loader changes, now or later, and a task can use; or nobody can set back."""
    for task, name in (loader.may_be_used_by(reaches) | loader.used_by(reaches)).items():
        yield f"The loader changes {name}, which {task!r} may use, so a batch is pulled after it."
    if modified := loader.modified:
        yield (
            f"The loader modifies {listed(sorted(modified), most=3)} in place with each batch, "
            "which the loop's body may use."
        )


def _shared_arrays(loader: Reach, reaches: Mapping[str, Reach]) -> Iterator[str]:
    """Arrays that the loader may read and a task may modify."""
    arrays = {number for number, one in loader.holders.items() if is_array(one)}
    for task, reach in reaches.items():
        shared = arrays & reach.holders.keys()
        if shared and (reach.modifies or any(reach.may_change(PlaceId(n, "")) for n in shared)):
            yield f"The loader and {task!r} may both use an array, so a batch is pulled after it."


def _modified_batches(recorded: Recording, loader: Reach, batch: Any) -> Iterator[str]:
    """Tasks that modify a batch which the loader gives again, or makes others of."""
    names = [task for task, attribute in recorded.modified if attribute == "batch"]
    if names and keeps(loader, batch):
        who = listed([repr(name) for name in sorted(names)])
        yield (
            f"{who} modifies the batch in place, and the loader keeps it, so a batch is pulled "
            "after it."
        )


def _draws(effects: EffectTable, loader: Reach) -> Iterator[str]:
    """Tasks that may draw from generators that the loader's code may draw from, too."""
    for generator in sorted(may_draw(loader)):
        place = Location(generator, True)
        names = [repr(name) for name, touched in effects.items() if place in touched.writes]
        if names:
            yield (
                f"{listed(names)} draws from {generator}, and the loader's code may draw from "
                "them, too, so a batch is pulled after it."
            )


def _bound(loader: Reach) -> Iterator[str]:
    if bound := bound_to_thread(loader):
        yield f"The loader uses a {bound}, which belongs to the thread that made it."


def _stateless(
    recording: Recording, reaches: Mapping[str, Reach]
) -> tuple[tuple[str, ...], list[str]]:
    """The tasks that use no state that a task or the body of the loop changes, directly or not."""
    effects, tasks = recording.effects, recording.tasks
    changed = {place for each in effects.values() for place in each.writes if place.persistent}
    behind: dict[str, str] = {}
    for one in tasks:
        touched = effects[one.name]
        if shared := (touched.reads | touched.writes) & changed:
            behind[one.name] = f"{one.name!r} uses {_listed(shared)}."
        elif touched.own_thread:
            own = _listed(touched.own_thread)
            behind[one.name] = f"{one.name!r} uses {own}, of which each thread has its own."
        elif one.random:
            behind[one.name] = f"{one.name!r} draws random numbers, and so may the loop's body."
        elif trained := next(trainable(reaches[one.name]), ""):
            behind[one.name] = f"{one.name!r} can reach {trained}, which the loop's body may train."
        elif own := _changes(one.name, recording, reaches[one.name]):
            behind[one.name] = f"{one.name!r} changes {own}, which the loop's body may use."
    orders = [conflict for conflict in conflicts(effects) if not conflict.place.persistent]
    for _ in effects:
        for edge in orders:
            if edge.producer in behind and edge.consumer not in behind:
                place = _listed({edge.place})
                behind[edge.consumer] = (
                    f"{edge.consumer!r} comes after {edge.producer!r} ({place})."
                )
    return tuple(name for name in effects if name not in behind), list(behind.values())


def trainable(reach: Reach) -> Iterator[str]:
    """What code can reach of what training changes."""
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        tensors = one.parameters() if isinstance(one, torch.nn.Module) else [one]
        if isinstance(one, torch.optim.Optimizer) or any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        ):
            yield min(names) or type(one).__name__


def _changes(task: str, recording: Recording, reach: Reach) -> str:
    """The Python values outside the context that a task has changed, or its code assigns to."""
    changed = assigned(reach) | {name for one, name in recording.changed if one == task}
    return listed(sorted(changed), most=3) if changed else ""


def assigned(reach: Reach) -> set[str]:
    """The Python values that code assigns to."""
    return {path for place, path in reach.places.items() if place.name in reach.stores}


def _listed(places: Iterable[Location]) -> str:
    return listed(sorted(map(str, places)), most=3)
