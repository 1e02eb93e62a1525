"""Everything about a plan that can be refused before the first batch, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from swpipe.core.dependence import CycleError, dependences, lag, period_order, serial_order
from swpipe.core.drawing import format_grid
from swpipe.core.errors import PlanError, Problem
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.task import PipelineTask


def check(plan: PipelinePlan, tasks: Sequence[PipelineTask], device: str = "cpu") -> None:
    """Refuse what cannot run.

    Args:
        plan: The plan.
        tasks: The tasks that it is to run.
        device: Name of the device that the pipeline uses, such as "cpu" or "cuda:0"; without an
            index, any of its kind.

    Raises:
        PlanError: Lists all that is wrong, with the period x task grid.
    """
    problems = [*_tasks(plan, tasks), *_entries(plan, device), *_names(plan)]
    if not problems:  # what follows needs sound entries and known names
        problems = [*_future_reads(plan), *_cycles(plan)]
    if problems:
        raise PlanError(problems, _faulty_grid(plan, problems))


def tasks_given(
    plan: PipelinePlan, tasks: Iterable[PipelineTask] | None
) -> tuple[PipelineTask, ...]:
    """The tasks that a pipeline was given, or else those that its plan has.

    Raises:
        PlanError: ``plan`` is no plan, or ``tasks`` nothing that can be gone through.
    """
    if not isinstance(plan, PipelinePlan):
        raise PlanError([Problem(f"the plan is {plan!r}: give a PipelinePlan, then the tasks")])
    if tasks is not None and not isinstance(tasks, Iterable):
        raise PlanError([Problem(f"tasks is {tasks!r}: give the tasks in a list")])
    return plan.tasks if tasks is None else tuple(tasks)


def _tasks(plan: PipelinePlan, tasks: Sequence[object]) -> Iterator[Problem]:
    if not plan.schedule:
        yield Problem("the plan is empty: schedule at least one task")
    for task in tasks:
        if not isinstance(task, PipelineTask):
            yield Problem(
                f"tasks has {task!r}, which is no task: write PipelineTask(name, function)"
            )
    names = [task.name for task in tasks if isinstance(task, PipelineTask)]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Problem(
                f"task {name!r} is given {names.count(name)} times: names are unique", (name,)
            )
        if name not in plan.schedule:
            yield Problem(
                f"task {name!r} has no schedule: add it to the plan, or leave the task out"
            )
    for name in plan.schedule:
        if name not in names:
            known = ", ".join(names) or "none"
            yield Problem(
                f"the plan schedules {name!r}, which is not among the tasks ({known}): "
                "correct the name, or take it out of the schedule",
                (name,),
            )


def _entries(plan: PipelinePlan, device: str) -> Iterator[Problem]:
    for name, entry in plan.schedule.items():
        yield from _entry(name, entry, device)
    used = {e.stream for e in plan.schedule.values() if isinstance(e.stream, str)}
    for stream, spec in plan.streams.items():
        if not isinstance(spec, StreamSpec) or type(spec.priority) is not int:
            yield Problem(f"stream {stream!r}: its description is {spec!r}; give a StreamSpec")
        elif stream not in used:
            named = ", ".join(sorted(used)) or "none"
            yield Problem(f"streams has {stream!r}, but no task names it (named are: {named})")
    if all(type(e.stage) is int for e in plan.schedule.values()):
        yield from _depth(plan)


def _depth(plan: PipelinePlan) -> Iterator[Problem]:
    least = max(plan.max_stage, 0) + 1
    if type(plan.depth) is not int or plan.depth < least:
        last = [n for n, e in plan.schedule.items() if e.stage == least - 1]
        yield Problem(
            f"pipeline_depth is {plan.depth!r}, but stage {least - 1} of {_quoted(last)} needs "
            f"{least} iterations in flight: set it to {least} or more, or leave it out",
            tuple(last),
        )


def _entry(name: str, entry: TaskSchedule, device: str) -> Iterator[Problem]:
    if type(entry.stage) is not int or entry.stage < 0:
        yield Problem(
            f"task {name!r}: stage is {entry.stage!r}; stages are integers from 0", (name,)
        )
    if not isinstance(entry.thread_group, str) or not entry.thread_group:
        yield Problem(
            f"task {name!r}: thread_group is {entry.thread_group!r}; give a name, "
            f"{DEFAULT_GROUP!r} for the caller's own thread",
            (name,),
        )
    stream = entry.stream
    if isinstance(stream, torch.Stream):
        if not _fits(stream.device, device):
            yield Problem(
                f"task {name!r}: its stream belongs to {stream.device}, unknown to the pipeline's "
                f"device ({device}): name the stream instead, or give SWPipeline that device",
                (name,),
            )
    elif stream is not None and not (isinstance(stream, str) and stream):
        yield Problem(
            f"task {name!r}: stream is {stream!r}; give a name, a torch.Stream, or None", (name,)
        )


def _fits(stream: torch.device, device: str) -> bool:
    kind, _, index = device.partition(":")
    return stream.type == kind and (not index or stream.index in (None, int(index)))


def _names(plan: PipelinePlan) -> Iterator[Problem]:
    pairs: list[tuple[str, tuple[str, ...]]] = [("deps", pair) for pair in plan.deps]
    pairs += [("cross_iter_deps", (c, p)) for c, p, _ in plan.cross_iter_deps]
    pairs += [("same_period_deps", pair) for pair in plan.same_period_deps]
    pairs += [("order", (name,)) for name in plan.order]
    for source, names in pairs:
        for name in names:
            if name not in plan.schedule:
                yield Problem(
                    f"{source} names {name!r}, which the schedule does not have "
                    f"(it has: {', '.join(plan.schedule)})",
                    tuple(n for n in names if n in plan.schedule),
                )
    for name in dict.fromkeys(plan.order):
        if plan.order.count(name) > 1:
            yield Problem(
                f"order names {name!r} {plan.order.count(name)} times: once is enough", (name,)
            )


def _future_reads(plan: PipelinePlan) -> Iterator[Problem]:
    for dep in dependences(plan):
        if (periods := lag(plan, dep)) < 0:
            s_c, s_p = plan.schedule[dep.consumer].stage, plan.schedule[dep.producer].stage
            yield Problem(
                f"future read: {dep}: {dep.consumer!r} (stage {s_c}) runs {-periods} period(s) "
                f"before {dep.producer!r} (stage {s_p}) has: move {dep.consumer!r} to stage "
                f"{s_c - periods} or later, or {dep.producer!r} to stage "
                f"{max(0, s_p + periods)} or earlier",
                (dep.consumer, dep.producer),
            )


def _cycles(plan: PipelinePlan) -> Iterator[Problem]:
    """Cycles within an iteration (across stages too), within a period, and a contrary order."""
    within = [d for d in dependences(plan) if d.distance == 0]
    try:
        serial_order(plan, list(plan.schedule))
    except CycleError as error:
        yield Problem(
            f"the dependences within an iteration form a cycle: {_cycle(error)}; none of these "
            f"tasks can be first: take out one of {'; '.join(map(str, within))}",
            error.cycle,
        )
        return
    unordered = PipelinePlan(plan.schedule, plan.deps, plan.cross_iter_deps, plan.same_period_deps)
    try:
        period_order(unordered)
    except CycleError as error:
        yield Problem(
            f"the dependences within a period form a cycle: {_cycle(error)}; take one out, or "
            "move a task to another stage",
            error.cycle,
        )
        return
    try:
        period_order(plan)
    except CycleError as error:
        yield Problem(
            f"order contradicts the dependences: {_cycle(error)}; swap these names in order, "
            "or leave them out of it",
            error.cycle,
        )


def _cycle(error: CycleError) -> str:
    return " after ".join(repr(name) for name in error.cycle)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _faulty_grid(plan: PipelinePlan, problems: Sequence[Problem]) -> str:
    """The grid, as far as one can be drawn: tasks whose stage is no number have no row."""
    rows = [n for n, e in plan.schedule.items() if type(e.stage) is int and e.stage >= 0]
    faulty = {name for problem in problems for name in problem.tasks}
    last = max((plan.schedule[name].stage for name in rows), default=0)
    return format_grid(plan, rows, min(last, 20) + 3, faulty=faulty) if rows else ""


def check_plan(plan: PipelinePlan) -> None:
    """Refuse a plan that cannot be compiled; its tasks and its device need not be at hand.

    Raises:
        PlanError: Lists all that is wrong, with the period x task grid.
    """
    entries = (e for e in plan.schedule.values() if isinstance(e, TaskSchedule))
    streams = (e.stream for e in entries if isinstance(e.stream, torch.Stream))
    device_type = next((stream.device.type for stream in streams), "cpu")
    tasks = plan.tasks or [PipelineTask(name, _nothing) for name in plan.schedule]
    check(plan, tasks, device_type)


def _nothing(ctx: object) -> None:
    return None
