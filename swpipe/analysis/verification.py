"""The one question about a plan: can it run, and does it give the numbers of the serial run?

``verify`` asks, in this order:

1. ``validation``: can the plan run at all?
2. ``happens_before``: which order does it keep in every interleaving of threads and streams?
3. ``races``: does any interleaving let tasks touch the same attribute or state in another order
   than serially?
4. ``memory``: how many bytes may be in flight?
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swpipe.analysis.last_readers import recorded_uses, uses_of
from swpipe.analysis.memory import Footprint, Sizes, bytes_in_flight, memory_problems, size_problems
from swpipe.analysis.races import (
    is_proved,
    problems_beside_the_body,
    race_problems,
    required_orders,
    stale_problems,
)
from swpipe.analysis.validation import refusal, validate
from swpipe.core.effects import (
    Effects,
    EffectTable,
    anything,
    declared_effects,
    unknown_beside,
    with_the_others,
)
from swpipe.core.loaders import is_apart
from swpipe.core.messages import listed, shown
from swpipe.core.plan import BODY, OTHERS, PipelinePlan
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import PipelineTask
from swpipe.errors import PlanError, Problem


@dataclass(frozen=True, slots=True)
class Verified:
    """A plan that was found correct.

    Attributes:
        orders: How many required orders it keeps; 0 means that no conflict is known.
        footprint: What may be in flight at most; None if no sizes were given.
        undeclared: Tasks of which nothing is declared. They stay with the loop's body; declared,
            they might run ahead.
    """

    orders: int
    footprint: Footprint | None
    undeclared: tuple[str, ...] = ()


def verify(
    plan: PipelinePlan,
    tasks: Iterable[PipelineTask] | None = None,
    effects: EffectTable | None = None,
    *,
    streams: bool | None = None,
    sizes: Sizes | None = None,
    budget_bytes: int | None = None,
    loader: Iterable[Any] | None = None,
    pull_ahead: bool = False,
    body: bool = True,
) -> Verified:
    """Make sure that a plan gives the numbers of the serial run in every interleaving.

    What is checked is what is declared: ``pure=True``, the states in ``io``, and ``effects``, which
    a recorded iteration gives. Whoever says nothing (a task, the loader, the loop's body) may touch
    everything that is not said to be apart from it.

    Args:
        plan: The plan.
        tasks: The tasks that it is to run; their declared states are checked. May be left out where
            ``effects`` are given, or the plan has the tasks themselves.
        effects: What each task touches, in serial order, which the plan must keep; joined with the
            states that the tasks declare. Without it, serial order is that of a pipeline: that of
            the tasks, as far as the dependences within an iteration allow. Entries ``"<pull>"``,
            the first, and ``"<body>"``, the last, are what the loader and the body touch.
        streams: Whether the device has streams. None asks for both kinds of device: stream order
            keeps tasks apart that are free on a CPU, and program order keeps tasks apart on a CPU
            that streams let go. A plan that is right on one kind only is refused then, which the
            message says.
        sizes: (task, attribute) to the bytes that the task leaves there, as recorded.
        budget_bytes: What may be in flight at most; needs ``sizes``.
        loader: Where the batches come from. A list, or torch's ``DataLoader`` with workers, is
            known to be apart (``swpipe.core.loaders``); without one nothing is known.
        pull_ahead: Any other loader is apart, too, as for ``swpipe.overlap``.
        body: The loop has a body, as with ``iterate()`` and ``progress()``; False for ``run()``.

    Returns:
        How much there was to check, and the memory's bound.

    Raises:
        PlanError: Lists all that is wrong.
        TypeError: Neither tasks nor effects, or a budget without sizes.
    """
    given = tasks_given(plan, tasks)
    if not given and effects is None:
        raise TypeError("verify needs the tasks, or a table of their effects: give one of the two")
    if budget_bytes is not None and sizes is None:
        raise TypeError("a budget needs sizes to check against: give those of a recorded iteration")
    resolved = validate(plan, given or None)
    apart = pull_ahead or (loader is not None and is_apart(loader))
    table = _table(resolved, given, effects, apart=apart, body=body)
    late = streams is not False  # with streams memory comes back later: the bound is larger
    uses = uses_of(given, effects) if given else recorded_uses(effects or {})
    problems = [*_name_problems(plan, table), *size_problems(plan, sizes or {})]
    if not problems:
        problems = [*stale_problems(plan, table), *race_problems(resolved, table, streams=streams)]
        if sizes is not None and budget_bytes is not None:
            problems += memory_problems(resolved, sizes, budget_bytes, streams=late, uses=uses)
    if problems:
        raise refusal(plan, problems)
    footprint = None
    if sizes is not None:
        footprint = bytes_in_flight(resolved, sizes, streams=late, uses=uses)
    return Verified(
        orders=len(set(required_orders(table, plan.stale))),
        footprint=footprint,
        undeclared=tuple(
            n for n, touched in table.items() if touched.undeclared and n not in OTHERS
        ),
    )


def tasks_given(
    plan: PipelinePlan, tasks: Iterable[PipelineTask] | None
) -> tuple[PipelineTask, ...]:
    """The tasks that were given, or else those that the plan has.

    Raises:
        PlanError: ``plan`` is no plan, or ``tasks`` cannot be iterated over.
    """
    if not isinstance(plan, PipelinePlan):
        raise PlanError(
            [Problem(f"the plan is {shown(plan)}: give a PipelinePlan, then the tasks")]
        )
    if tasks is not None and not isinstance(tasks, Iterable):
        raise PlanError([Problem(f"tasks is {shown(tasks)}: give the tasks in a list")])
    return plan.tasks if tasks is None else tuple(tasks)


def given_for_run(
    plan: PipelinePlan,
    tasks: Iterable[PipelineTask] | None,
    keep: Sequence[str] | None,
    run_ahead: int | None,
) -> tuple[PipelinePlan, tuple[PipelineTask, ...]]:
    """The plan, with what a pipeline was given in its place; and ``tasks_given``."""
    given = tasks_given(plan, tasks)
    plan = plan if keep is None else replace(plan, keep=keep)
    return plan if run_ahead is None else replace(plan, run_ahead=run_ahead), given


def resolve_for_run(
    plan: PipelinePlan,
    tasks: Sequence[PipelineTask],
    effects: EffectTable | None,
    *,
    device: str,
    streams: bool,
) -> ResolvedPlan:
    """What a pipeline asks before it compiles: 1 to 3, for its device and what tasks declare.

    Where there are recorded effects, the plan is verified for them.

    Raises:
        PlanError: Lists all that is wrong.

    Warns:
        RuntimeWarning: ``run_ahead`` on a device without streams.
    """
    resolved = validate(plan, tasks, device)
    if plan.run_ahead is not None and not streams:
        warnings.warn(
            f"run_ahead={plan.run_ahead} means nothing on {device!r}, which has no streams and is "
            "never behind the host: leave it out there",
            RuntimeWarning,
            stacklevel=3,
        )
    # A plan is its author's word about the order of tasks of which nothing is declared.
    table = _in_order(resolved, declared_effects(tasks, undeclared=False))
    if problems := race_problems(resolved, table, streams=streams):
        raise refusal(plan, problems)
    if effects is not None:  # that batches are pulled ahead is the plan's word
        verify(plan, tasks, effects, streams=streams, pull_ahead=True, body=False)
    return resolved


def refuse_beside_body(
    resolved: ResolvedPlan,
    tasks: Sequence[PipelineTask],
    effects: EffectTable | None,
    *,
    streams: bool,
) -> None:
    """Refuse a pipeline's plan for a loop with a body.

    Raises:
        PlanError: Tasks may touch a state in another order with the body than serially.
    """
    table = _in_order(resolved, declared_effects(tasks, undeclared=False))
    if effects is not None:
        table = {name: effects.get(name, Effects()) | touched for name, touched in table.items()}
    body = {BODY: (effects or {}).get(BODY, unknown_beside(tasks))}
    if problems := problems_beside_the_body(resolved, {**table, **body}, streams=streams):
        raise refusal(resolved.plan, problems)


def is_proved_by_declarations(
    resolved: ResolvedPlan, tasks: Iterable[PipelineTask], *, streams: bool
) -> bool:
    """Whether a plan gives the serial numbers if all tasks do what they declare, and no more."""
    table = _in_order(resolved, declared_effects(tasks))
    return is_proved(resolved, table, streams=streams)


def _table(
    resolved: ResolvedPlan,
    tasks: Sequence[PipelineTask],
    effects: EffectTable | None,
    *,
    apart: bool,
    body: bool,
) -> EffectTable:
    """What was recorded, if anything, and what the tasks declare; in serial order."""
    if effects is None:
        table = _in_order(resolved, declared_effects(tasks))
    else:
        declared = declared_effects(tasks, undeclared=False)  # the effects say it of themselves
        table = {name: found | declared.get(name, Effects()) for name, found in effects.items()}
    unknown = unknown_beside(tasks) if tasks else anything(table.values())
    if BODY not in table:  # a recording has said it of all that say nothing
        table = {name: one | unknown if one.undeclared else one for name, one in table.items()}
    return with_the_others(table, unknown, apart=apart, body=body)


def _in_order(resolved: ResolvedPlan, effects: EffectTable) -> EffectTable:
    return {name: effects[name] for name in resolved.serial_order}


def _name_problems(plan: PipelinePlan, table: EffectTable) -> Iterator[Problem]:
    rule = f"which the plan does not schedule (it has: {listed(plan.schedule)})"
    for name in table:
        if name not in plan.schedule and name not in OTHERS:
            yield Problem(f"effects name task {name!r}, {rule}: they belong to other tasks")
    for name in plan.schedule:
        if name not in table:
            mend = "give it an entry in effects, Effects() if it touches nothing"
            yield Problem(f"nothing is known of what task {name!r} touches: {mend}", (name,))
