"""The rules that a plan can break before the first batch, checked all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from swpipe.core.dependence import CycleError, ProposedStage
from swpipe.core.drawing import format_grid
from swpipe.core.messages import listed, shown
from swpipe.core.plan import (
    DEFAULT_GROUP,
    HOST,
    MOST_ITERATIONS,
    MOST_TASKS,
    MOST_WORK,
    PipelinePlan,
    StreamSpec,
    TaskSchedule,
)
from swpipe.core.resolved import ResolvedPlan, dependences_of, resolve_plan
from swpipe.core.task import PipelineTask
from swpipe.errors import PlanError, Problem

MOST_ROWS = 20
"""The maximum number of rows in a message's grid; of a larger plan, it has only tasks at fault."""

PRIORITIES = range(-128, 128)


def validate(
    plan: PipelinePlan, tasks: Sequence[PipelineTask] | None = None, device: str | None = None
) -> ResolvedPlan:
    """Refuse a plan that cannot run; resolve one that can.

    Args:
        plan: The plan.
        tasks: The tasks to run; None for the plan's own, if any.
        device: The pipeline's device, such as "cpu" or "cuda:0", or "cuda" for any of this type.
            None if it is not known yet.

    Raises:
        PlanError: Lists all problems, with the period x task grid.
    """
    tasks = plan.tasks or None if tasks is None else tasks
    problems = [*_tasks(plan, tasks), *_entries(plan, device), *_names(plan)]
    # The next checks need sound entries, known names and a plan that is not too large.
    problems = problems or [*_work(plan)]
    if not problems:
        problems = [*_future_reads(plan)]
        # A plan with future reads may have a cycle as well: both are reported together.
        try:
            resolved = resolve_plan(plan, None if tasks is None else [task.name for task in tasks])
        except CycleError as error:
            problems.append(_cycle(plan, error))
    if problems:
        raise refusal(plan, problems)
    return resolved


def refusal(plan: PipelinePlan, problems: Sequence[Problem]) -> PlanError:
    """Return the error that refuses a plan, with a grid of all tasks whose stage is a number."""
    rows = [n for n, e in plan.schedule.items() if type(e.stage) is int and e.stage >= 0]
    faulty = {name for problem in problems for name in problem.tasks}
    # The grid of thousands of tasks would hide those at fault.
    if len(rows) > MOST_ROWS:
        rows = [name for name in rows if name in faulty][:MOST_ROWS]
    # More than some 20 periods do not fit into the width of a terminal.
    last = max((plan.schedule[name].stage for name in rows), default=0)
    grid = format_grid(plan, rows, min(last, 20) + 3, faulty=faulty) if rows else ""
    return PlanError(problems, grid)


def _tasks(plan: PipelinePlan, tasks: Sequence[object] | None) -> Iterator[Problem]:
    if not plan.schedule:
        yield Problem("the plan is empty: schedule at least one task")
    if len(plan.schedule) > MOST_TASKS:
        rule = f"a plan has at most {MOST_TASKS}: join some of them"
        yield Problem(f"the plan has {len(plan.schedule)} tasks, but {rule}")
    if tasks is None:
        return
    for task in tasks:
        if not isinstance(task, PipelineTask):
            mend = "write PipelineTask(name, function)"
            yield Problem(f"tasks has {shown(task)}, which is no task: {mend}")
    # Entries that are no task have been reported above, and have no name.
    names = Counter([task.name for task in tasks if isinstance(task, PipelineTask)])
    for name in (name for name, count in names.items() if count > 1):
        yield Problem(f"task {name!r} is given {names[name]} times: names are unique", (name,))
    scheduled = plan.schedule.keys()
    known = listed([*names.elements()])
    for name in names:
        if name not in scheduled:
            mend = "add it to the plan, or leave the task out"
            yield Problem(f"task {name!r} has no schedule: {mend}")
    # Both directions, since a misspelt name is missing on one side and unknown on the other.
    for name in scheduled:
        if name not in names:
            what = f"the plan schedules {name!r}, which is not among the tasks ({known})"
            mend = "correct the name, or take it out of the schedule"
            yield Problem(f"{what}: {mend}", (name,))


def _work(plan: PipelinePlan) -> Iterator[Problem]:
    far = max((distance for _, _, distance in plan.cross_iter_deps), default=0)
    tasks = len(plan.schedule)
    stages = plan.max_stage + 1
    deps = len(plan.deps) + len(plan.cross_iter_deps) + len(plan.same_period_deps)
    # The compiler walks every task of every period, so its time grows with this product.
    if tasks * (stages + far) + deps > MOST_WORK:
        yield Problem(
            f"{tasks} tasks in {stages} stages, with distances up to {far} iterations and {deps} "
            "dependences, take too long to compile: tasks x (stages + distance) + dependences may "
            f"be {MOST_WORK} at most; use fewer"
        )


def _entries(plan: PipelinePlan, device: str | None) -> Iterator[Problem]:
    for name, entry in plan.schedule.items():
        for text in _entry(entry, device):
            yield Problem(f"task {name!r}: {text}", (name,))
    names = {e.stream for e in plan.schedule.values() if isinstance(e.stream, str)}
    used = sorted(names - {HOST})
    for stream, spec in plan.streams.items():
        where = f"stream {shown(stream)}"
        if not isinstance(spec, StreamSpec) or type(spec.priority) is not int:
            yield Problem(f"{where}: its description is {shown(spec)}; give a StreamSpec")
            continue
        if spec.priority not in PRIORITIES:
            rule = f"priorities are integers from {PRIORITIES[0]} to {PRIORITIES[-1]}"
            yield Problem(f"{where}: its priority is {shown(spec.priority)}; {rule}")
        if stream not in used:
            named = f"named are: {listed(used)}"
            yield Problem(f"streams has {shown(stream)}, but no task names it ({named})")
    # Declared as object, since a plan from a file or an untyped caller may have any value here.
    within: object = plan.within_calls
    if type(within) is not bool:
        yield Problem(f"within_calls is {shown(within)}: write True or False")
    group = plan.pull_group
    if group is not None and (not isinstance(group, str) or group in ("", DEFAULT_GROUP)):
        yield Problem(
            f"pull_group is {shown(group)}: give the name of a thread group other than "
            f"{DEFAULT_GROUP!r}, or leave it out to pull batches on the caller's thread"
        )
    elif all(
        # Depth and workers are computed from stages: they are checked only if these are numbers.
        type(e.stage) is type(e.workers) is int and max(e.stage, e.workers) < MOST_ITERATIONS
        for e in plan.schedule.values()
    ):
        yield from _workers(plan)
        yield from _depth(plan)
    ahead: object = plan.run_ahead
    if ahead is not None and (type(ahead) is not int or not 0 <= ahead <= MOST_ITERATIONS):
        yield Problem(
            f"run_ahead is {shown(ahead)}: give how many iterations the host may launch ahead of "
            f"the device, an integer from 0 to {MOST_ITERATIONS}, or leave it out"
        )


def _workers(plan: PipelinePlan) -> Iterator[Problem]:
    """Yield a problem for each group with workers whose tasks do not fit together."""
    # Threads of a group run different iterations at once, so its tasks have to agree.
    for group in plan.thread_groups:
        entries = {n: e for n, e in plan.schedule.items() if e.thread_group == group}
        counts = sorted({entry.workers for entry in entries.values()})
        stages = sorted({entry.stage for entry in entries.values()})
        # Lists are compared, so that a group without tasks ([]) counts as one with one worker.
        if counts[-1:] <= [1]:
            continue
        text = f"thread_group {shown(group)} has {counts[-1]} workers, "
        if group in (DEFAULT_GROUP, plan.pull_group):
            owner = "the caller" if group == DEFAULT_GROUP else "the loader's calls"
            text += f"and is the thread of {owner}, which is one: give its tasks one of their own"
        elif len(counts) > 1:
            text += "and not in all of its tasks: they go together, so give all of them one number"
        elif len(stages) > 1:
            text += (
                f"and tasks in stages {listed([*map(str, stages)])}: each worker does all tasks of "
                "an iteration, one after the other, so give them one stage"
            )
        else:
            continue
        yield Problem(text, tuple(entries))


def _depth(plan: PipelinePlan) -> Iterator[Problem]:
    # A plan of one stage still needs one iteration in flight.
    least = max(plan.least_depth, 1)
    depth = plan.pipeline_depth
    depth = least if depth is None else depth
    if type(depth) is not int or depth < least:
        stage = max(plan.max_stage, 0)
        last = [n for n, e in plan.schedule.items() if e.stage == stage]
        pulled = "" if plan.pull_group is None else f" and pull_group {shown(plan.pull_group)}"
        workers = f" and {plan.most_workers} workers" if plan.most_workers > 1 else ""
        # The message names everything that raises the minimum.
        needs = "need" if pulled or workers else "needs"
        yield Problem(
            f"pipeline_depth is {shown(depth)}, but stage {stage} of {listed([*map(repr, last)])}"
            f"{pulled}{workers} {needs} {least} iterations in flight: set it to {least} or more, "
            "or leave it out",
            tuple(last),
        )
    elif depth > MOST_ITERATIONS:
        rule = f"at most {MOST_ITERATIONS} iterations may be in flight"
        yield Problem(f"pipeline_depth is {shown(depth)}, but {rule}: set it to {least}")


def _entry(entry: TaskSchedule, device: str | None) -> list[str]:
    problems = []
    stream = entry.stream
    # Types are compared, so that True, which is an int, is refused.
    if type(entry.stage) is not int or not 0 <= entry.stage < MOST_ITERATIONS:
        rule = f"stages are integers from 0 to {MOST_ITERATIONS - 1}"
        problems.append(f"stage is {shown(entry.stage)}; {rule}")
    if type(entry.workers) is not int or not 1 <= entry.workers < MOST_ITERATIONS:
        rule = f"give the number of threads, an integer from 1 to {MOST_ITERATIONS - 1}"
        problems.append(f"workers is {shown(entry.workers)}; {rule}")
    if not isinstance(entry.thread_group, str) or not entry.thread_group:
        rule = f"give a name, {DEFAULT_GROUP!r} for the caller's own thread"
        problems.append(f"thread_group is {shown(entry.thread_group)}; {rule}")
    if isinstance(stream, torch.Stream):
        # "cuda" without an index stands for any device of this type, as does a stream without one.
        kind, _, index = (device or "").partition(":")
        there = stream.device.type == kind and (
            not index or stream.device.index in (None, int(index))
        )
        if device is not None and not there:
            problems.append(
                f"its stream belongs to {stream.device}, unknown to the pipeline's device "
                f"({device}): name the stream instead, or give SWPipeline that device"
            )
    elif stream is not None and not (isinstance(stream, str) and stream):
        problems.append(f"stream is {shown(stream)}; give a name, a torch.Stream, or None")
    return problems


def _names(plan: PipelinePlan) -> Iterator[Problem]:
    pairs: list[tuple[str, tuple[str, ...]]] = [("deps", pair) for pair in plan.deps]
    pairs += [("cross_iter_deps", (c, p)) for c, p, _ in plan.cross_iter_deps]
    pairs += [("same_period_deps", pair) for pair in plan.same_period_deps]
    declared = {pair for _, pair in pairs}
    scheduled = plan.schedule.keys()
    # host_only changes an edge that is declared elsewhere, and is none itself.
    for pair in plan.host_only:
        if pair not in declared:
            text = f"host_only has {shown(pair)}, and no dependence is declared between these two"
            mend = "add it to deps, cross_iter_deps or same_period_deps, or take it out"
            yield Problem(f"{text}: {mend}", tuple(n for n in pair if n in scheduled))
    pairs += [("order", (name,)) for name in plan.order]
    for source, names in pairs:
        for name in names:
            if name not in scheduled:
                known = f"(it has: {listed(plan.schedule)})"
                text = f"{source} names {name!r}, which the schedule does not have {known}"
                yield Problem(text, tuple(n for n in names if n in scheduled))
    for name, count in Counter(plan.order).items():
        if count > 1:
            yield Problem(f"order names {name!r} {count} times: once is enough", (name,))


def _future_reads(plan: PipelinePlan) -> Iterator[Problem]:
    for dep in dependences_of(plan):
        # A negative lag: in the consumer's period, the producer has not run on that iteration yet.
        if dep.lag < 0:
            consumer = dep.consumer
            producer = dep.producer
            s_c = plan.schedule[consumer].stage
            s_p = plan.schedule[producer].stage
            later = ProposedStage(s_c - dep.lag, "later")
            earlier = ProposedStage(max(0, s_p + dep.lag), "earlier")
            yield Problem(
                f"future read: {dep}: {consumer!r} (stage {s_c}) runs {-dep.lag} period(s) before "
                f"{producer!r} (stage {s_p}) has: move {consumer!r} to {later}, or {producer!r} "
                f"to {earlier}",
                (consumer, producer),
                (later, earlier),
            )


def _cycle(plan: PipelinePlan, error: CycleError) -> Problem:
    pairs = {*pairwise(error.cycle)}
    deps = [dep for dep in dependences_of(plan) if dep[:2] in pairs]
    within = [dep for dep in deps if dep.distance == 0]
    # Each cause has its own mend: stages cannot break a cycle within an iteration.
    if {dep[:2] for dep in within} == pairs:
        cause = "the dependences within an iteration form a cycle"
        mend = f"none of these tasks can be first: take out one of {listed([*map(str, within)])}"
    elif {dep[:2] for dep in deps if dep.lag == 0} == pairs:
        cause = "the dependences within a period form a cycle"
        mend = "take one out, or move a task to another stage"
    else:
        cause = "order contradicts the dependences"
        mend = "swap these names in order, or leave them out of it"
    return Problem(f"{cause}: {error}; {mend}", error.cycle)
