"""Recording of what tasks read and write in serial iterations; all state is then restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.loop import LoopState
from swpipe._values.stateful import Owners
from swpipe.analysis.validation import validate
from swpipe.core.context import TypedContext, context_class
from swpipe.core.effects import Declared, Effects, one_place_each, unnamed_changes
from swpipe.core.loaders import is_apart
from swpipe.core.plan import BODY, PULL, PipelinePlan
from swpipe.core.task import PipelineTask, checked_tasks
from swpipe.device import resolve as resolve_device
from swpipe.inference.accesses import add_transfers, find_accesses, find_transfers
from swpipe.inference.groups import effects_of, group
from swpipe.inference.notes import notes_on
from swpipe.inference.observing import IterationObserver, run_alone
from swpipe.inference.operators import copied
from swpipe.inference.recording import Recording
from swpipe.inference.shown_state import shown_state
from swpipe.inference.states import assign_declared, items_in


def record(
    tasks: Iterable[PipelineTask],
    batch: Any,
    *,
    context: type[TypedContext] | None = None,
    iterations: int = 2,
    device: Any = None,
    seed: int | None = None,
    state: Any = None,
    loader: Iterable[Any] | None = None,
) -> Recording:
    """Run a few iterations serially and record what each task reads and writes.

    A task's declarations count too; an undeclared task is also assumed to touch every state that is
    not declared private. If ``state`` is None, two additional iterations run first. They show
    which modules the tasks call, which optimizers step, and which other memory the tasks write.
    Afterwards these objects, the generators, and whatever tasks declare with ``memory``, or with
    ``capture`` and ``restore``, are restored, also if a task fails. Any other state ends up as if
    these iterations had been part of the training.

    Args:
        tasks: In serial order.
        batch: Each iteration gets a copy, in which the tensors that ``swpipe._values.walk``
            finds are cloned.
        context: The class of the contexts, as for ``SWPipeline``.
        iterations: How many iterations to run; everything that a task accesses in any of them
            counts. The first one may create state that later ones only use, such as an optimizer's.
            Memory that outlives an iteration is recognized only if there are at least two.
        device: See ``SWPipeline``.
        seed: The seed for tasks with ``random=True``; see ``SWPipeline``.
        state: The objects to restore, in a list or by names; None for those that torch shows.
        loader: The loader of the training loop. It is not called. Its effects are those of
            ``"<pull>"``, the first entry of ``effects``: none if the loader is apart from the loop
            (``swpipe.core.loaders``); otherwise those of an undeclared task.

    Raises:
        PlanError: There are no tasks, or two have the same name.
        ValueError: ``iterations`` is no integer of 1 or more.
        TypeError: Something in ``state`` cannot be restored, or ``context`` cannot be used.
        UnsavedStateError: Tasks call the step of an optimizer that is not restored, or may step a
            scheduler that is not.
        BaseException: The exception that a task raised, with a note of where.
    """
    tasks = checked_tasks(tasks)
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}: give an integer of 1 or more")
    # Declarations that no plan can satisfy are refused before any task runs.
    validate(PipelinePlan.serial(tasks), tasks)
    where = resolve_device(device)
    seeds = TaskSeeds(seed, where)
    kind = context_class(context)
    if state is None:

        def run(batch: Any) -> None:
            ctx = kind(batch, 0)
            for task in tasks:
                run_alone(task, ctx, where, seeds)

        # As a serial loop would run them, without observers: this only shows which objects to
        # restore.
        state = shown_state(tasks, run, batch, where, copied)
    saved = LoopState(tasks, state, where)
    observer = IterationObserver(tasks, where, seeds, kind, [*saved.owners])
    with saved.trial():
        observed = [observer.run(batch, number) for number in range(iterations)]
        # Still inside the trial: restoring may remove optimizer state, and these items with it.
        items = assign_declared(items_in(observer.owners).tensors, tasks)
        trained = {item for item, tensor in items.items() if tensor.requires_grad}
    accesses = find_accesses(
        observed, observer.storages, [task.name for task in tasks if task.random]
    )
    states = group(accesses)
    observed_effects = effects_of(accesses, states)
    transfers = find_transfers(observed, observed_effects, observer.storages)
    runs = [each for iteration in observed for each in iteration.tasks]
    declarations = Declared.by(tasks)
    # Observed effects and declared ones add up: a recording cannot see all that a task touches.
    effects = add_transfers(observed_effects, transfers)
    for name, declared in declarations.effects.items():
        effects[name] |= declared
    undeclared = declarations.undeclared | unnamed_changes(observed_effects, declarations)
    # Without a loader nothing is known of the pull, so it gets no entry rather than a guess.
    pull = {} if loader is None else {PULL: Effects() if is_apart(loader) else undeclared}
    return Recording(
        tasks=tasks,
        effects=one_place_each(pull | effects | {BODY: undeclared}),
        states={name: tuple(item.name for item in items) for name, items in states.items()},
        collectives=frozenset(each.task for each in runs if each.operators.collectives),
        owners=Owners(saved.owners),
        notes=notes_on(tasks, observed_effects, states, trained, runs, transfers),
    )
