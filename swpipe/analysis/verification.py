"""The one question about a plan: can it run, and does it give the numbers of the serial run?

It is asked in this order:

1. ``validation``: can the plan run at all?
2. ``happens_before``: which order does it keep in every interleaving of threads and streams?
3. ``races``: does any interleaving let tasks touch the same attribute or state in another order
   than serially?
4. ``memory``: how many bytes may be in flight?

``verify`` answers a user. ``verify_for_run`` asks for a pipeline, and gives what was derived on the
way, a ``VerifiedPlan``: whoever runs, watches or draws the plan is handed that, and derives nothing
again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swpipe._engine.program import Program, compile_plan
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import with_releases
from swpipe.analysis.memory import Footprint, bytes_in_flight, memory_problems
from swpipe.analysis.races import (
    guarantees,
    proves,
    race_problems,
    required_orders,
    stale_problems,
)
from swpipe.analysis.validation import refusal, validate
from swpipe.core.effects import Declared, Effects, EffectTable, anything, with_the_others
from swpipe.core.loaders import is_apart
from swpipe.core.messages import listed, shown
from swpipe.core.plan import BODY, OTHERS, PULL, PipelinePlan
from swpipe.core.releases import Releases
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import PipelineTask
from swpipe.core.task_memory import TaskMemory
from swpipe.errors import PlanError, Problem


@dataclass(frozen=True, slots=True)
class Verified:
    """A plan that was found correct.

    Attributes:
        orders: How many required orders it keeps; 0 means that no conflict is known.
        footprint: What may be in flight at most; None if no memory was given.
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
    memory: TaskMemory | None = None,
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
            the first, and ``"<body>"``, the last, are what the loader and the body touch; alone,
            they stand beside what the tasks declare.
        streams: Whether the device has streams. None asks for both kinds of device: stream order
            keeps tasks apart that are free on a CPU, and program order keeps tasks apart on a CPU
            that streams let go. A plan that is right on one kind only is refused then, which the
            message says.
        memory: What the tasks hold, from ``swpipe.profiler.measure_memory``.
        budget_bytes: What may be in flight at most; needs ``memory``.
        loader: Where the batches come from. A list, or torch's ``DataLoader`` with workers, is
            known to be apart (``swpipe.core.loaders``); without one nothing is known.
        pull_ahead: Any other loader is apart, too, as for ``swpipe.overlap``.
        body: The loop has a body, as with ``iterate()`` and ``progress()``; False for ``run()``.

    Returns:
        How much there was to check, and the memory's bound.

    Raises:
        PlanError: Lists all that is wrong.
        TypeError: Neither tasks nor effects, or a budget without memory.
    """
    given = tasks_given(plan, tasks)
    if not given and effects is None:
        raise TypeError("verify needs the tasks, or a table of their effects: give one of the two")
    if budget_bytes is not None and memory is None:
        mend = "give memory=measure_memory(tasks, batches)"
        raise TypeError(f"a budget needs what the tasks hold to check against: {mend}")
    resolved = validate(plan, given or None)
    apart = pull_ahead or (loader is not None and is_apart(loader))
    declared = Declared.by(given) if given else None
    table = _table(resolved, declared, effects, apart=apart, body=body)
    guaranteed = guarantees(resolved, streams)
    if memory is not None:
        memory.check(plan.schedule)
    if not (problems := _name_problems(plan, table)):
        problems = [*stale_problems(plan, table), *race_problems(table, guaranteed)]
        if memory is not None and budget_bytes is not None:
            problems += memory_problems(guaranteed[0], memory, budget_bytes)
    if problems:
        raise refusal(plan, problems)
    # With streams memory comes back later: the bound is larger.
    footprint = None if memory is None else bytes_in_flight(guaranteed[0], memory)
    return Verified(
        orders=len(set(required_orders(table, plan.stale, plan.newer))),
        footprint=footprint,
        undeclared=tuple(n for n in table if table[n].undeclared and n not in OTHERS),
    )


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A plan that a pipeline runs, and what follows from it.

    Attributes:
        tasks: The tasks, in serial order.
        declared: What they declare of what they touch.
        touched: What they, the loader and the loop's body touch, as far as the plan has to keep
            order between them; in serial order.
        before: Which task comes before which, on the pipeline's kind of device.
        program: What its threads run.
        releases: Which attributes go where; None where all stay.
    """

    tasks: tuple[PipelineTask, ...]
    declared: Declared
    touched: EffectTable
    before: HappensBefore
    program: Program
    releases: Releases | None

    @property
    def resolved(self) -> ResolvedPlan:
        """The plan, its dependences and its orders."""
        return self.program.resolved

    @property
    def plan(self) -> PipelinePlan:
        """The plan."""
        return self.resolved.plan

    def refuse_beside_body(self) -> None:
        """Refuse the plan for a loop with a body.

        Raises:
            PlanError: Tasks may touch a state in another order with the body than serially.
        """
        if problems := race_problems(self.touched, [self.before], beside_body=True):
            raise refusal(self.plan, problems)

    def proved_by_declarations(self) -> bool:
        """Whether it gives the serial numbers if tasks do what they declare, and no more."""
        return proves(_in_order(self.resolved, self.declared.effects), self.before)


def verify_for_run(
    plan: PipelinePlan,
    tasks: Iterable[PipelineTask] | None,
    effects: EffectTable | None,
    *,
    device: str,
    streams: bool,
    keep: Sequence[str] | None = None,
    run_ahead: int | None = None,
    record_all: bool = False,
) -> VerifiedPlan:
    """Verify a plan for a pipeline's device, and compile it.

    A plan is its author's word about the order of tasks of which nothing is declared; with
    ``effects`` it is checked for these, too. That batches are pulled ahead is the plan's word.

    Raises:
        PlanError: Lists all that is wrong.

    Warns:
        RuntimeWarning: ``run_ahead`` on a device without streams.
    """
    given = tasks_given(plan, tasks)
    changes = {"keep": keep, "run_ahead": run_ahead}
    if changes := {name: value for name, value in changes.items() if value is not None}:
        plan = replace(plan, **changes)  # type: ignore[arg-type]  # each has its field's type
    resolved = validate(plan, given, device)
    if plan.run_ahead is not None and not streams:
        warnings.warn(
            f"run_ahead={plan.run_ahead} means nothing on {device!r}, which has no streams and is "
            "never behind the host: leave it out there",
            RuntimeWarning,
            stacklevel=4,
        )
    by_name = {task.name: task for task in given}
    in_order = tuple([by_name[name] for name in resolved.serial_order])
    declared, releases = Declared.by(in_order), None
    program = compile_plan(resolved, streams=streams, record_all=record_all)
    before = HappensBefore(program)
    if effects is None:
        touched: EffectTable = {**_in_order(resolved, declared.named), BODY: declared.unknown}
    else:
        touched = _table(resolved, declared, effects, apart=True, body=True)
    if problems := _run_problems(declared, touched, before):
        raise refusal(plan, problems)
    if plan.keep is not None:
        program, releases = with_releases(before, in_order, effects, plan.keep)
    return VerifiedPlan(in_order, declared, touched, before, program, releases)


def _run_problems(declared: Declared, touched: EffectTable, before: HappensBefore) -> list[Problem]:
    """What is wrong without a body: ``run`` has none."""
    resolved = before.program.resolved
    table = {name: one for name, one in touched.items() if name != BODY}
    if problems := _name_problems(resolved.plan, table):
        return problems
    problems = [*_silent_workers(resolved.plan, declared), *race_problems(table, [before])]
    if PULL in table:  # these are effects that were given
        problems = stale_problems(resolved.plan, table) + problems
        if not problems and [name for name in table if name != PULL] != [*resolved.serial_order]:
            said = _in_order(resolved, declared.named)  # as a serial run has it
            problems = race_problems(said, [before])
    return problems


def _silent_workers(plan: PipelinePlan, declared: Declared) -> Iterator[Problem]:
    """Tasks that would run beside themselves, and neither they nor the plan say that they may."""
    said = {consumer for consumer, producer, _ in plan.cross_iter_deps if consumer == producer}
    for name in sorted(declared.silent - said):
        if (workers := plan.schedule[name].workers) > 1:
            yield Problem(
                f"nothing is declared of what {name!r} touches, and its {workers} workers would "
                "run it on as many iterations at once: say pure=True, if it uses its context and "
                "what nobody changes, and changes its context only; name its states; or leave "
                "workers out",
                (name,),
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


def _table(
    resolved: ResolvedPlan,
    declared: Declared | None,
    effects: EffectTable | None,
    *,
    apart: bool,
    body: bool,
) -> EffectTable:
    """What was recorded, if anything, and what the tasks declare; in serial order."""
    recorded = {n: touched for n, touched in (effects or {}).items() if n not in OTHERS}
    others = {n: touched for n, touched in (effects or {}).items() if n in OTHERS}
    unknown = anything([*recorded.values()]) if declared is None else declared.unknown
    if declared is not None and not recorded and (effects is None or others):
        recorded = dict(_in_order(resolved, declared.effects))
    else:
        if declared is not None:  # the effects say it of themselves, where nothing is declared
            named = declared.named
            recorded = {n: one | named.get(n, Effects()) for n, one in recorded.items()}
        if BODY not in others:  # a recording has said it of all that say nothing
            recorded = {n: one | unknown if one.undeclared else one for n, one in recorded.items()}
    if PULL in others and BODY not in others and others[PULL].undeclared:
        others[PULL] |= unknown
    table = {**others, **recorded}
    return with_the_others(table, unknown, apart=apart, body=body)


def _in_order(resolved: ResolvedPlan, effects: EffectTable) -> EffectTable:
    return {name: effects[name] for name in resolved.serial_order}


def _name_problems(plan: PipelinePlan, table: EffectTable) -> list[Problem]:
    known = {*plan.schedule, *OTHERS}
    strange = [name for name in table if name not in known]
    unknown = [name for name in plan.schedule if name not in table]
    rule = "which the plan does not schedule (it has: {})"
    mend = "give it an entry in effects, Effects() if it touches nothing"
    return [
        Problem(
            f"effects name task {name!r}, {rule.format(listed(plan.schedule))}: they belong to "
            "other tasks"
        )
        for name in strange
    ] + [
        Problem(f"nothing is known of what task {name!r} touches: {mend}", (name,))
        for name in unknown
    ]
