"""The verification of a plan: can it run, and does it give the numbers of the serial run?

It has four steps, in this order:

1. ``validation``: can the plan run at all?
2. ``happens_before``: which order does it keep in every interleaving of threads and streams?
3. ``races``: does any interleaving let tasks touch the same attribute or state in another order
   than serially?
4. ``memory``: how many bytes may be in flight?

``verify`` answers a user. ``verify_for_run`` answers a pipeline, and also returns what it has
derived on the way, as a ``VerifiedPlan``: code that runs, watches or draws the plan gets that
object, and derives nothing again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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
from swpipe.core.effects import (
    Declared,
    Effects,
    EffectTable,
    one_place_each,
    undeclared_effects,
    unnamed_changes,
    with_the_others,
)
from swpipe.core.loaders import is_apart
from swpipe.core.messages import listed, shown
from swpipe.core.plan import BODY, OTHERS, PULL, PipelinePlan
from swpipe.core.releases import Releases
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import PipelineTask
from swpipe.core.task_memory import TaskMemory
from swpipe.errors import PlanError, Problem
from swpipe.program import Program, compile_plan


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for a plan that was found correct.

    Attributes:
        orders: The number of required orders that the plan keeps; 0 if no conflict is known.
        footprint: The maximum memory in flight; None if no memory was given.
        undeclared: The undeclared tasks. They stay with the loop's body; with a declaration, they
            might run ahead.
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
    """Check that a plan gives the numbers of the serial run in every interleaving.

    The check is based on declarations: ``pure=True``, the states in ``io``, and ``effects``, which
    a recorded iteration gives. Undeclared code (a task, the loader, the loop's body) is assumed to
    read and write every state that is not declared private.

    Args:
        plan: The plan.
        tasks: The tasks that it is to run; their declared states are checked. May be left out if
            ``effects`` are given, or the plan has the tasks itself.
        effects: The effects of each task, in serial order, which the plan must keep; joined with
            the states that the tasks declare. Without them, the serial order is that of a pipeline:
            the order of the tasks, as far as the dependences within an iteration allow. Entries
            ``"<pull>"``, the first, and ``"<body>"``, the last, are the effects of the loader and
            the body; alone, they are added to what the tasks declare.
        streams: Whether the device has streams. None checks both kinds of device: stream order
            keeps tasks apart that are free on a CPU, and program order keeps tasks apart on a CPU
            that are free on streams. A plan that is right on one kind only is refused then, and the
            message says so.
        memory: The memory that the tasks hold, from ``swpipe.profiler.measure_memory``.
        budget_bytes: The maximum memory in flight; needs ``memory``.
        loader: The source of the batches. A list, or torch's ``DataLoader`` with workers, is known
            to be apart (``swpipe.core.loaders``); without a loader nothing is known.
        pull_ahead: Whether any other loader is declared to be apart, too, as for
            ``swpipe.overlap``.
        body: Whether the loop has a body, as with ``iterate()`` and ``progress()``; False for
            ``run()``.

    Returns:
        How much there was to check, and the bound of the memory.

    Raises:
        PlanError: Lists all problems.
        TypeError: There are neither tasks nor effects, or there is a budget without memory.
    """
    given = tasks_given(plan, tasks)
    if not given and effects is None:
        raise TypeError("verify needs the tasks, or a table of their effects: give one of the two")
    if budget_bytes is not None and memory is None:
        mend = "give memory=measure_memory(tasks, batches)"
        raise TypeError(f"a budget needs what the tasks hold to check against: {mend}")
    resolved = validate(plan, given or None)
    apart = pull_ahead or (loader is not None and is_apart(loader))
    table = _table(resolved, Declared.by(given), effects, apart=apart, body=body)
    guaranteed = guarantees(resolved, streams)
    if memory is not None:
        memory.check(plan.schedule)
    # With unknown names, the table has no effects for some tasks, and no order can be checked.
    if not (problems := _name_problems(plan, table)):
        problems = [*stale_problems(plan, table), *race_problems(table, guaranteed)]
        if memory is not None and budget_bytes is not None:
            problems += memory_problems(guaranteed[0], memory, budget_bytes)
    if problems:
        raise refusal(plan, problems)
    # The first kind is the one with streams, if both were asked for: memory is freed later there,
    # so the bound is larger.
    footprint = None if memory is None else bytes_in_flight(guaranteed[0], memory)
    return Verified(
        orders=len(set(required_orders(table, plan.stale, plan.newer))),
        footprint=footprint,
        undeclared=tuple(n for n in table if table[n].undeclared and n not in OTHERS),
    )


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A plan that a pipeline runs, with everything that was derived to verify it.

    Attributes:
        tasks: The tasks, in serial order.
        declared: The declarations of these tasks.
        touched: The effects of tasks, loader and loop's body that the plan has to order; in serial
            order.
        before: The order that the program keeps, on the pipeline's kind of device.
        program: The program that its threads run.
        releases: The places where attributes are deleted; None if all attributes stay.
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
        """Raise an error if the plan is wrong for a loop with a body.

        Raises:
            PlanError: Tasks and body may touch a state in another order than serially.
        """
        if problems := race_problems(self.touched, [self.before], beside_body=True):
            raise refusal(self.plan, problems)

    def proved_by_declarations(self) -> bool:
        """Return whether the plan gives the serial numbers if tasks do only what they declare."""
        return proves(_in_order(self.resolved, self.declared.effects), self.before)


def verify_for_run(
    plan: PipelinePlan,
    tasks: Iterable[PipelineTask] | None,
    effects: EffectTable | None,
    *,
    device: str,
    streams: bool,
) -> VerifiedPlan:
    """Verify a plan for a pipeline's device, and compile it.

    The order of undeclared tasks in the plan is taken as declared by its author; with ``effects``
    it is checked for them, too. A plan that pulls batches ahead declares that the loader allows it.

    Args:
        plan: The plan.
        tasks: The tasks to run; None for the plan's own.
        effects: The recorded effects, if any.
        device: The name of the pipeline's device.
        streams: Whether this device has streams.

    Raises:
        PlanError: Lists all problems.

    Warns:
        RuntimeWarning: The plan has a ``run_ahead``, and the device has no streams.
    """
    given = tasks_given(plan, tasks)
    resolved = validate(plan, given, device)
    if plan.run_ahead is not None and not streams:
        warnings.warn(
            f"run_ahead={plan.run_ahead} has no effect on {device!r}, which has no streams and is "
            "never behind the host: leave it out for this device",
            RuntimeWarning,
            stacklevel=3,
        )
    by_name = {task.name: task for task in given}
    in_order = tuple([by_name[name] for name in resolved.serial_order])
    # Compiled once: the checks, the pipeline and its drawings all use this program.
    declared = Declared.by(in_order)
    releases = None
    program = compile_plan(resolved, streams=streams)
    before = HappensBefore(program)
    # Undeclared tasks have no effects here, since the plan's order stands for their declaration.
    if effects is None:
        touched: EffectTable = {**_in_order(resolved, declared.named), BODY: declared.undeclared}
    else:
        touched = _table(resolved, declared, effects, apart=True, body=True)
    if problems := _run_problems(declared, touched, before):
        raise refusal(plan, problems)
    # Releases need the order that was checked, and add events to the program.
    if plan.keep is not None:
        program, releases = with_releases(before, in_order, effects, plan.keep)
    return VerifiedPlan(in_order, declared, touched, before, program, releases)


def _run_problems(declared: Declared, touched: EffectTable, before: HappensBefore) -> list[Problem]:
    """Return the problems of a run without a body; ``refuse_beside_body`` checks the body."""
    resolved = before.program.resolved
    # ``run()`` has no body: what touches the body is refused by the first ``progress()``.
    table = {name: of_task for name, of_task in touched.items() if name != BODY}
    if problems := _name_problems(resolved.plan, table):
        return problems
    problems = [*_undeclared_workers(resolved.plan, declared), *race_problems(table, [before])]
    # Only recorded effects have an entry of the loader.
    if PULL in table:
        problems = stale_problems(resolved.plan, table) + problems
        # The effects may be in another serial order than the run: declared states are checked in
        # the order of the run as well.
        problems = problems or race_problems(_in_order(resolved, declared.named), [before])
    return problems


def _undeclared_workers(plan: PipelinePlan, declared: Declared) -> Iterator[Problem]:
    """Yield a problem for each undeclared task with workers, unless the plan orders its runs."""
    ordered = {consumer for consumer, producer, _ in plan.cross_iter_deps if consumer == producer}
    for name in sorted(declared.undeclared_tasks - ordered):
        if (workers := plan.schedule[name].workers) > 1:
            yield Problem(
                f"the effects of task {name!r} are not declared, and its {workers} workers would "
                "run it on as many iterations at once: declare pure=True if it changes its context "
                "only, and uses nothing else that changes; declare its states in io; or leave "
                "workers out",
                (name,),
            )


def tasks_given(
    plan: PipelinePlan, tasks: Iterable[PipelineTask] | None
) -> tuple[PipelineTask, ...]:
    """Return the tasks that were given, or else the plan's own.

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
    declared: Declared,
    effects: EffectTable | None,
    *,
    apart: bool,
    body: bool,
) -> EffectTable:
    """Return the recorded and the declared effects of tasks, loader and body, in serial order."""
    recorded = {n: touched for n, touched in (effects or {}).items() if n not in OTHERS}
    others = {n: touched for n, touched in (effects or {}).items() if n in OTHERS}
    named = declared.named
    undeclared = declared.undeclared if named else undeclared_effects(recorded.values())
    # Without a recording, declarations are all there is; undeclared tasks touch all they may.
    if named and not recorded and (effects is None or others):
        recorded = dict(_in_order(resolved, declared.effects))
    else:
        undeclared |= unnamed_changes(recorded, declared)
        # A recording tells what undeclared tasks touch: only named states are added to it.
        recorded = {n: of_task | named.get(n, Effects()) for n, of_task in recorded.items()}
        # A recording with a body has been widened by all that undeclared code may touch.
        if BODY not in others:
            recorded = {
                n: of_task | undeclared if of_task.undeclared else of_task
                for n, of_task in recorded.items()
            }
    # A recording of loader and tasks only does not know what an undeclared loader may touch.
    if PULL in others and BODY not in others and others[PULL].undeclared:
        others[PULL] |= undeclared
    table = {**others, **recorded}
    return one_place_each(with_the_others(table, undeclared, apart=apart, body=body))


def _in_order(resolved: ResolvedPlan, effects: EffectTable) -> EffectTable:
    return {name: effects[name] for name in resolved.serial_order}


def _name_problems(plan: PipelinePlan, table: EffectTable) -> list[Problem]:
    # A table of another plan's effects would otherwise verify nothing, without a word.
    known = {*plan.schedule, *OTHERS}
    strange = [name for name in table if name not in known]
    unknown = [name for name in plan.schedule if name not in table]
    rule = "which the plan does not schedule (it has: {})"
    mend = "add one, Effects() if the task touches nothing"
    return [
        Problem(
            f"effects has an entry for task {name!r}, {rule.format(listed(plan.schedule))}: give "
            "the effects of the plan's tasks"
        )
        for name in strange
    ] + [Problem(f"effects has no entry for task {name!r}: {mend}", (name,)) for name in unknown]
