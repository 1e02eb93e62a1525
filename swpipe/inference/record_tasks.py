"""Records what tasks touch: one or two serial iterations, after which all is as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.discovery import Found, find_all, find_state, given_state
from swpipe._state.snapshot import Snapshot
from swpipe.core.effects import declared_effects
from swpipe.core.errors import PlanError, Problem
from swpipe.core.task import PipelineTask
from swpipe.device import resolve as resolve_device
from swpipe.inference.attributes import save_attributes
from swpipe.inference.facts import IterationFacts
from swpipe.inference.groups import effects_of, group
from swpipe.inference.handed import handed_over, with_handed
from swpipe.inference.notes import notes
from swpipe.inference.recorded_iteration import Recorder
from swpipe.inference.recording import Recording
from swpipe.inference.slots import Reached, reached_by
from swpipe.inference.uses import resolve

MAX_SAVED_BYTES = 2**26
"""A tensor that requires no grad and lies in no module is saved only up to this size: beyond, it
is rather data than state."""


def record(
    tasks: Iterable[PipelineTask],
    batch: Any,
    *,
    iterations: int = 2,
    device: Any = None,
    seed: int | None = None,
    state: Any = None,
) -> Recording:
    """Run a few iterations serially, and learn what each task touches.

    Parameters, buffers, gradients and optimizer state are recognised by themselves. Afterwards
    models, optimizers, other objects with ``state_dict``, tensors within reach and generators are
    put back as they were, also when a task fails. What was not put back stands in the notes.

    Args:
        tasks: In serial order.
        batch: Every iteration gets a copy of it, as far as ``swpipe._tensors.pytree`` finds
        tensors in it.
        iterations: How many to run. The first may make what later ones only use, such as the state
            of an optimizer; and only from one to the next is it seen what survives. What any of
            them touches counts.
        device: As for ``SWPipeline``.
        seed: For tasks that draw; as for ``SWPipeline``.
        state: What to put back; None looks for it in all that the tasks can reach.

    Raises:
        PlanError: There are no tasks, or two have one name.
        ValueError: ``iterations`` is not a whole number of 1 or more.
        TypeError: Something in ``state`` cannot be put back.
        BaseException: Whatever a task raised, with a note of where.
    """
    tasks = tuple(tasks)
    _check(tasks, iterations)
    where = resolve_device(device)
    owners = list(_owners(tasks) if state is None else given_state(state))
    snapshot = Snapshot(owners, where)
    put_back_attributes = save_attributes(tasks)
    before = reached_by(tasks)
    recorder = Recorder(tasks, where, TaskSeeds(seed, where))
    try:
        seen = [recorder.run(batch, number) for number in range(iterations)]
    finally:
        put_back_attributes()
        snapshot.restore()
    uses = resolve(seen, recorder.storages)
    states = group(uses)
    effects = effects_of(uses, states)
    declared = declared_effects(tasks)
    effects = {name: found | declared[name] for name, found in effects.items()}
    handed = handed_over(seen, effects, recorder.storages)
    return Recording(
        tasks=tasks,
        effects=with_handed(effects, handed),
        states={name: tuple(slot.name for slot in slots) for name, slots in states.items()},
        sizes=_sizes(seen),
        collectives=frozenset(f.task for one in seen for f in one.tasks if f.collectives),
        notes=notes(tasks, seen, uses, handed, list(_left_changed(before, reached_by(tasks)))),
    )


def _check(tasks: Sequence[PipelineTask], iterations: int) -> None:
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}: give a whole number, 1 or more")
    names = [task.name for task in tasks]
    problems = [
        Problem(f"task {name!r} is given {names.count(name)} times: names are unique", (name,))
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if not tasks:
        problems.append(Problem("there are no tasks to record: give at least one"))
    if problems:
        raise PlanError(problems)


def _owners(tasks: Sequence[PipelineTask]) -> Iterator[Found]:
    """What has state, and tensors within reach that are not too large."""
    found = find_state(tasks)
    yield from found
    known = {id(one.owner) for one in found}
    for one in find_all(tasks):
        owner = one.owner
        if not isinstance(owner, Tensor) or id(owner) in known:
            continue
        if owner.numel() * owner.element_size() <= MAX_SAVED_BYTES:
            yield one


def _sizes(seen: Iterable[IterationFacts]) -> Mapping[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for iteration in seen:
        for facts in iteration.tasks:
            for name, size in facts.sizes.items():
                sizes[facts.task, name] = max(size, sizes.get((facts.task, name), 0))
    return sizes


def _left_changed(before: Reached, after: Reached) -> Iterator[str]:
    """What the recorded iterations changed and nothing put back."""
    for slot, tensor in before.tensors.items():
        if after.tensors.get(slot) is not tensor:
            yield slot.name
    for path, value in before.plain.items():
        if path in after.plain and after.plain[path] != value:
            yield path
