"""Record what tasks read and write in one or more serial iterations; all state is then restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.loop import LoopState
from swpipe.core.context import TypedContext, context_class
from swpipe.core.effects import Effects, declared_effects, unknown_beside
from swpipe.core.loaders import is_apart
from swpipe.core.plan import BODY, PULL
from swpipe.core.task import PipelineTask, checked_tasks
from swpipe.device import resolve as resolve_device
from swpipe.errors import PlanError, Problem
from swpipe.inference.accesses import find_accesses
from swpipe.inference.declared import assign_declared
from swpipe.inference.groups import effects_of, group
from swpipe.inference.limitations import notes_on
from swpipe.inference.observation import IterationObservation, IterationObserver, TaskObservation
from swpipe.inference.recording import Recording
from swpipe.inference.state_items import ReachableItems, reachable_items
from swpipe.inference.transfers import add_transfers, find_transfers
from swpipe.inference.words import notes_on_words

MAX_ITERATIONS = 128
"""How many iterations are recorded at most, where their number is not given."""


def record(
    tasks: Iterable[PipelineTask],
    batch: Any,
    *,
    context: type[TypedContext] | None = None,
    iterations: int | None = 2,
    device: Any = None,
    seed: int | None = None,
    state: Any = None,
    loader: Iterable[Any] | None = None,
) -> Recording:
    """Run a few iterations serially and record what each task reads and writes.

    What a task declares counts too; one that says nothing also touches whatever is not said to be
    apart from it. Parameters, buffers, gradients and optimizer state are found automatically.
    Afterwards models, optimizers, other objects with ``state_dict``, reachable tensors, generators
    and what tasks declare with ``capture`` and ``restore`` are restored, also if a task fails. For
    all else a recording is so many more iterations; the notes list what of it was seen.

    Args:
        tasks: In serial order.
        batch: Each iteration gets a copy, in which the tensors that ``swpipe._tensors.pytree``
            finds are cloned.
        context: The class of the contexts, as for ``SWPipeline``.
        iterations: How many to run; everything that a task accesses in any of them counts. The
            first may create state that later ones only use, such as an optimizer's. What outlives
            an iteration shows only from one iteration to the next. None to go on until two more
            iterations bring nothing new and every task has been seen to touch something, up to
            ``MAX_ITERATIONS``: for tasks that act now and then.
        device: As for ``SWPipeline``.
        seed: For tasks with ``random=True``; as for ``SWPipeline``.
        state: What to restore; by default, all state that the tasks can reach.
        loader: What training takes its batches from. It is not called. Its effects are those of
            ``"<pull>"``, the first entry of ``effects``: none if it is apart from the loop
            (``swpipe.core.loaders``); otherwise it may touch what a task may that says nothing.

    Raises:
        PlanError: There are no tasks, or two have the same name.
        ValueError: ``iterations`` is neither None nor an integer of 1 or more.
        TypeError: Something in ``state`` cannot be restored, or ``context`` cannot be used.
        UnsavedStateError: Tasks call the step of an optimizer that is not restored.
        BaseException: Whatever a task raised, with a note of where.
    """
    tasks = checked_tasks(tasks)
    _check(tasks, iterations)
    where = resolve_device(device)
    saved = LoopState(tasks, state, where)
    before = reachable_items(tasks)
    observer = IterationObserver(tasks, where, TaskSeeds(seed, where), context_class(context))
    with saved.trial(always=True, made=observer.storages.made):
        observed = _observe(observer, batch, iterations)
        reached = assign_declared(reachable_items(tasks).tensors, tasks)
        trained = {item for item, tensor in reached.items() if tensor.requires_grad}
    not_restored = list(_not_restored(before, reachable_items(tasks)))
    accesses = find_accesses(
        observed, observer.storages, [task.name for task in tasks if task.random]
    )
    states = group(accesses)
    seen = effects_of(accesses, states)
    transfers = find_transfers(observed, seen, observer.storages)
    runs = [one for iteration in observed for one in iteration.tasks]
    declared = declared_effects(tasks)
    effects = {task: e | declared[task] for task, e in add_transfers(seen, transfers).items()}
    unknown = unknown_beside(tasks)
    pull = {} if loader is None else {PULL: Effects() if is_apart(loader) else unknown}
    return Recording(
        tasks=tasks,
        effects=pull | effects | {BODY: unknown},
        states={name: tuple(item.name for item in items) for name, items in states.items()},
        sizes=_sizes(runs),
        collectives=frozenset(one.task for one in runs if one.operators.collectives),
        notes=(
            *notes_on_words(tasks, runs, seen, states, trained),
            *notes_on(tasks, runs, accesses, transfers, not_restored),
        ),
    )


def _observe(
    observer: IterationObserver, batch: Any, iterations: int | None
) -> list[IterationObservation]:
    """Observe so many iterations, or as many as bring something new."""
    observed: list[IterationObservation] = []
    known: dict[str, frozenset[object]] = {}
    quiet = 0
    while len(observed) < (iterations or MAX_ITERATIONS):
        observed.append(observer.run(batch, len(observed)))
        found = {
            one.task: known.get(one.task, frozenset()) | one.touched for one in observed[-1].tasks
        }
        quiet = quiet + 1 if found == known else 0
        known = found
        if iterations is None and quiet >= 2 and all(known.values()):
            break
    return observed


def _check(tasks: Sequence[PipelineTask], iterations: int | None) -> None:
    if iterations is not None and (type(iterations) is not int or iterations < 1):
        raise ValueError(f"iterations is {iterations!r}: give an integer of 1 or more, or None")
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


def _sizes(runs: Iterable[TaskObservation]) -> Mapping[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for task in runs:
        for name, size in task.sizes.items():
            sizes[task.task, name] = max(size, sizes.get((task.task, name), 0))
    return sizes


def _not_restored(before: ReachableItems, after: ReachableItems) -> Iterator[str]:
    """Names of what still differs from before the recording."""
    for item, tensor in before.tensors.items():
        if after.tensors.get(item) is not tensor:
            yield item.name
    for path, value in before.plain.items():
        if path in after.plain and after.plain[path] != value:
            yield path
