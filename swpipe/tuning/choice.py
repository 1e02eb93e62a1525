"""What of a loop may run ahead of its body: the loader, and tasks.

the loader    unless it uses what a task changes, or a task what it changes, or a task modifies
              batches that it keeps, or only the thread that made it can use it
a task        unless it uses what a task or the body may train, or comes after one that does
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.inference import Recording
from swpipe.inference.generators import NUMPY, PYTHON, TORCH
from swpipe.inference.reach import Reach
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tuning.loader_draws import names_random
from swpipe.tuning.loader_parts import LOADER, bound_to_thread, keeps
from swpipe.tuning.pulled_values import Beside, PulledValues

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
    values: PulledValues,
    batch: Any,
) -> Overlap:
    """What runs ahead.

    Args:
        recorded: What tasks and loader touch.
        tasks: The tasks, in serial order.
        reaches: Task to what its code can reach.
        values: What the loader can reach, after the first pull.
        batch: The first batch.
    """
    effects = {name: touched for name, touched in recorded.effects.items() if name != LOADER}
    recording = replace(recorded, tasks=tuple(tasks), effects=effects)
    undeclared = {
        task.name: reaches[task.name] for task in tasks if not any(io.state for io in task.io)
    }
    shared = dict(_changed_by_tasks(recorded, effects))
    others = {name: reach for name, reach in undeclared.items() if name not in shared}
    why = (
        *shared.values(),
        *_changed_by_loader(values, others),
        *_modified_batches(recorded, values, batch),
        *_draws(effects, values),
        *_bound(values),
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


def runs_beside(found: Overlap, reaches: Mapping[str, Reach]) -> Beside | None:
    """What runs beside the loader; None if nothing does."""
    if not found.loader_ahead:
        return None
    tasks = found.recording.tasks
    writes = [touched.writes for touched in found.recording.effects.values()]
    names = {place.name for places in writes for place in places}
    return Beside(
        drawn=frozenset(names & {TORCH, PYTHON, NUMPY}),
        reaches={
            task.name: reaches[task.name]
            for task in tasks
            if task.name in reaches and not any(io.state for io in task.io)
        },
        seeded=any(task.random and task.name in found.ahead for task in tasks),
    )


def _changed_by_tasks(recorded: Recording, effects: EffectTable) -> Iterator[tuple[str, str]]:
    """What a task changes, and the loader can use; by the task's name."""
    own = recorded.effects[LOADER]
    places = own.reads | own.writes
    for name, touched in effects.items():
        if shared := {p for p in touched.writes & places if p.persistent}:
            both = _listed(shared)
            why = f"The loader and {name!r} may both use {both}, so a batch is pulled after it."
            yield name, why


def _changed_by_loader(values: PulledValues, reaches: Mapping[str, Reach]) -> Iterator[str]:
    """What the code of the loader assigns to, or its first pull has changed, and a task can use."""
    own, named = values.reach, dict[str, set[str]]()
    changed = {place: values.values[place].name for place in values.changed}
    for task, reach in reaches.items():
        shared = {
            path
            for place, path in own.places.items()
            if place in reach.places and place.name and place.name in own.stores
        }
        shared |= {
            name
            for place, name in changed.items()
            if place in reach.places or (not place.name and place.holder in reach.holders)
        }
        if shared:
            named[task] = shared
            yield (
                f"The loader changes {listed(sorted(shared), most=3)}, which {task!r} may use, so "
                "a batch is pulled after it."
            )
    known = set[str]().union(*named.values())
    if modified := {name for name in values.modified if name not in known}:
        yield (
            f"The loader modifies {listed(sorted(modified), most=3)} in place with each batch, "
            "which the loop's body may use."
        )


def _modified_batches(recorded: Recording, values: PulledValues, batch: Any) -> Iterator[str]:
    """Tasks that modify a batch which the loader gives again, or makes others of."""
    names = [task for task, attribute in recorded.modified if attribute == "batch"]
    if names and keeps(values.reach, batch):
        who = listed([repr(name) for name in sorted(names)])
        yield (
            f"{who} modifies the batch in place, and the loader keeps it, so a batch is pulled "
            "after it."
        )


def _draws(effects: EffectTable, values: PulledValues) -> Iterator[str]:
    """Tasks that draw from generators that the loader's code may draw from, now or later."""
    default = {Location(PYTHON, True), Location(NUMPY, True)}
    drawing = [name for name, touched in effects.items() if touched.writes & default]
    if drawing and names_random(values.reach):
        yield (
            f"{listed([repr(name) for name in drawing])} draws random numbers of Python or numpy, "
            "and so may the loader, so a batch is pulled after it."
        )


def _bound(values: PulledValues) -> Iterator[str]:
    if bound := bound_to_thread(values.reach):
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
        elif trained := _trained(reaches[one.name]):
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


def _trained(reach: Reach) -> str:
    """What the task's code can reach of what training changes; empty if nothing."""
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        tensors = one.parameters() if isinstance(one, torch.nn.Module) else [one]
        if isinstance(one, torch.optim.Optimizer) or any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        ):
            return min(names) or type(one).__name__
    return ""


def _changes(task: str, recording: Recording, reach: Reach) -> str:
    """The Python values outside the context that a task has changed, or its code assigns to."""
    assigned = {path for place, path in reach.places.items() if place.name in reach.stores}
    changed = {name for one, name in recording.changed if one == task}
    return listed(sorted(assigned | changed), most=3) if assigned | changed else ""


def _listed(places: Iterable[Location]) -> str:
    return listed(sorted(map(str, places)), most=3)
