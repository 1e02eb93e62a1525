"""What to change next: the planner's plan, and the tasks to make faster.

The planner gets the loop as it was measured: its tasks' costs, the plan's dependences, what the
tasks declare. The simulator runs its plan over the sampled iterations, and predicts an iteration in
proportion to what it says for the plan that was measured; the cores that there are limit it too.
Batches that differ are evened out by more iterations in flight: so many are tried, too, from few to
``MOST_AHEAD``. Moving tasks cannot save more than their exposed times, so that is the most that is
promised; and nothing is, where the interval of what is saved contains 0. If the plan declares no
dependences between iterations, it is not known which task may move, and none is moved; nor is a
task of which nothing is declared, away from the loop's body.

What a task saves that takes half as long is simulated as well. A step is convex in the cost of a
task: half the cost saves at least half of the task's own part of its exposed time, and never more
than all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe._engine.program import OWN
from swpipe.core.costs import CostModel
from swpipe.core.effects import (
    Effects,
    EffectTable,
    conflicts,
    declared_effects,
    unknown_beside,
    with_the_others,
)
from swpipe.core.messages import counted, listed
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan, TaskSchedule
from swpipe.core.task import PipelineTask
from swpipe.errors import PlanError
from swpipe.profiler.figures import Advice, Figures
from swpipe.profiler.spread import Estimate, ms, short_ms, within

if TYPE_CHECKING:
    from swpipe.planning.simulation.interval import Limit

MOST = 3
"""So many changes are named."""

LEAST = 0.02
"""Less than this part of an iteration is not promised, and not known so well."""

LEAST_SHARE = 0.1
"""To make a task shorter is not advised where less than this part of that comes off the step."""

ERROR = 0.1
"""How far predicted iterations may be off: the simulator knows no contention for memory, or for
the interpreter lock."""

MORE = 1.1
"""A plan that is less simple has to promise so many times as much."""

EFFORT = 0.1
"""Of the planner: a tenth of a second for 14 tasks, if the lower bound is not reached."""

MOST_AHEAD = 16
"""The most iterations that are in flight beyond those of the planner's plan."""

_FEW = 4  # tasks that are named
_MOST_PLACES = 2  # to which tasks are moved, each in words of its own

_NO_DEPENDENCES = (
    "the plan declares no dependences between iterations; record the loop to find them"
)


class LoopFacts(NamedTuple):
    """What a profile does not say of a loop.

    Attributes:
        tasks: In serial order.
        plan: What it ran under; serially, the plan whose dependences it has.
        costs: Of all tasks, those that are not in the profile too.
        streams: Whether the device has streams.
        cpu_s: What an iteration takes of the cores, on the tasks' threads.
        loader: What the loader's calls may touch, if they were measured.
    """

    tasks: Sequence[PipelineTask]
    plan: PipelinePlan
    costs: CostModel
    streams: bool
    cpu_s: float
    loader: Effects | None = None


class _Planned(NamedTuple):
    """Another plan, if one promises something; what it moves; and task to why it is not moved."""

    advice: Advice | None
    moved: Sequence[str]
    why_not: Mapping[str, str]


def advise(result: Figures, loop: LoopFacts) -> tuple[Advice, ...]:
    """The changes that promise most: another plan comes first, since that needs no other program.

    None if the plan is too large to be simulated.
    """
    try:
        planned = _planned(result, loop)
    except PlanError:
        return ()
    found = [] if planned.advice is None else [planned.advice]
    found += sorted(_of_loader(result), key=lambda one: -one.saved_s)
    named = {one.task for one in found}
    halved = {task: _half(result, loop, task) for task in result.own_s}
    for task in sorted(halved, key=lambda task: -halved[task].value_s):
        saved = halved[task]
        least_s = max(LEAST * result.baseline_s, LEAST_SHARE * result.host_s[task] / 2)
        # What is certain has to be worth it: half of what the task's removal saves.
        is_known = result.own_s[task] / 2 > max(result.spread_s[task] / 2, least_s)
        if is_known and task not in planned.moved and task not in named:
            what, why_not = "the loader" if task == PULL else task, planned.why_not.get(task, "")
            words = f"make {what} take half as long"
            found.append(Advice(words, task, *saved, not_moved=why_not))
    return tuple(found[:MOST])


def _half(result: Figures, loop: LoopFacts, task: str) -> Estimate:
    """How much shorter an iteration is if a task takes half as long."""
    own_s, plan = result.own_s[task], _present(result, loop)
    now_us, _ = _predict(plan, loop)
    faster = loop._replace(costs=loop.costs.with_scaled({task: 0.5}))
    faster = faster._replace(cpu_s=loop.cpu_s - result.cpu_s(task) / 2)
    then_us, _ = _predict(plan, faster)
    then_s = _at_least(result, result.baseline_s * then_us / now_us) if now_us else 0.0
    saved_s = min(own_s, max(own_s / 2, result.baseline_s - then_s))
    guessed_s = ERROR * (saved_s - own_s / 2)  # no less than half is certain
    return Estimate(saved_s, result.spread_s[task] * saved_s / own_s + guessed_s if own_s else 0.0)


def _present(result: Figures, loop: LoopFacts) -> PipelinePlan:
    """The plan that was measured."""
    return loop.plan if result.mode == "pipelined" else _in_one_stage(loop.plan)


def _at_least(result: Figures, then_s: float) -> float:
    """A predicted iteration, which no plan makes faster than the loader is."""
    pace = result.loader
    if pace is None:
        return then_s
    return max(then_s, (pace.rate_s if pace.works_ahead else 0.0) + pace.start_s)


def _of_loader(result: Figures) -> Iterator[Advice]:
    """What to change of a loader that makes too few batches, or whose passes begin slowly."""
    pace, waits = result.loader, result.exposed(PULL)
    if pace is None or waits is None:
        return
    least_s = LEAST * result.baseline_s
    if result.limited_by_loader and (saved_s := waits.value_s - pace.start_s) > least_s:
        rest_s = result.baseline_s - waits.value_s
        more = pace.workers_for(max(rest_s, least_s))
        words = f"make a batch in {short_ms(rest_s)} ms instead of {short_ms(pace.rate_s)}"
        if pace.workers:
            words += f": {more} workers instead of {pace.workers}, or less work for each batch"
            if more > cores():
                words += f" ({counted(cores(), 'core')} here)"
        yield Advice(words, PULL, saved_s, waits.spread_s, "the rest of the step")
    if pace.start_s > least_s:
        words = "make the start of a pass of the loader take less time"
        if pace.starts_workers:
            words = "keep the loader's workers: DataLoader(persistent_workers=True)"
        yield Advice(words, PULL, pace.start_s, ERROR * pace.start_s)


def _planned(result: Figures, loop: LoopFacts) -> _Planned:
    """Compare other plans with the one that was measured.

    Raises:
        PlanError: The plan is too large.
    """
    plan = _present(result, loop)
    declared = declared_effects(loop.tasks)
    best, why_not = _Planned(None, (), {}), dict[str, str]()
    least_s, (now_us, _) = LEAST * result.baseline_s, _predict(plan, loop)
    for other in _others(result, plan, loop, declared, why_not) if now_us else ():
        moved = _moved(plan, other)
        then_us, limit = _predict(other, loop)
        beside = moved or [n for n, e in other.schedule.items() if e.thread_group != DEFAULT_GROUP]
        promise = _promise(result, beside, result.baseline_s * then_us / now_us)
        if promise.value_s > max(promise.spread_s, least_s):
            if best.advice is None or promise.value_s > MORE * best.advice.saved_s:
                words = _words(moved, other, plan)
                if PULL in moved and loop.loader is not None and loop.loader.undeclared:
                    words += ", if it uses nothing that the loop changes"
                task = max(moved, key=lambda name: result.exposed_s.get(name, 0.0), default="")
                advice = Advice(words, task, *promise, limit, plan=replace(other, tasks=()))
                best = _Planned(advice, moved, {})
        else:
            why = f"iterations would be limited by {limit}"
            if promise.value_s > least_s:
                might = f"{ms(promise.value_s)}{within(promise.spread_s, ms)}"
                why = f"it might save {might} ms, and may save nothing"
            why_not |= dict.fromkeys(plan.schedule, why)
    if best.advice is not None:
        why_not = {}
    elif not plan.cross_iter_deps:
        why_not = dict.fromkeys(plan.schedule, _NO_DEPENDENCES)
    return best._replace(why_not={**why_not, **_with_the_body(loop, declared)})


def _with_the_body(loop: LoopFacts, declared: EffectTable) -> dict[str, str]:
    """Why tasks stay with the loop's body."""
    from swpipe.planning.modulo.auto import shared_with_body

    why_not = {}
    for name, places in shared_with_body(conflicts(_with_the_others(loop, declared))).items():
        states = listed(sorted(map(str, places)))
        why_not[name] = f'the loop\'s body may touch {states}: say others="" if it does not'
        if declared[name].undeclared:
            why_not[name] = (
                f"nothing is declared of what {name!r} touches: say pure=True, or name states in io"
            )
    return why_not


def _with_the_others(loop: LoopFacts, declared: EffectTable) -> EffectTable:
    """A loader of which nothing is known is advised on with that condition."""
    return with_the_others(declared, unknown_beside(loop.tasks), apart=True, body=True)


def _others(
    result: Figures,
    plan: PipelinePlan,
    loop: LoopFacts,
    declared: EffectTable,
    why_not: dict[str, str],
) -> Iterator[PipelinePlan]:
    """Plans to compare with this one, the simplest first."""
    found = [*_overlapping(result, plan, loop, declared, why_not)]
    yield from found
    if loop.costs.iterations:
        if plan.max_stage or plan.pull_group is not None:
            found.insert(0, plan)
        ahead = 1
        while ahead <= MOST_AHEAD:
            yield from (replace(one, pipeline_depth=one.depth + ahead) for one in found)
            ahead *= 2


def _overlapping(
    result: Figures,
    plan: PipelinePlan,
    loop: LoopFacts,
    declared: EffectTable,
    why_not: dict[str, str],
) -> Iterator[PipelinePlan]:
    """Plans with as many iterations in flight as the mean costs need."""
    from swpipe.planning import Limits, auto_plan

    if PULL in loop.costs.tasks and plan.pull_group is None:
        depth = None if plan.pipeline_depth is None else plan.pipeline_depth + 1
        group = "loader" if "loader" not in plan.thread_groups else "loader_thread"
        yield replace(plan, pull_group=group, pipeline_depth=depth)
    if plan.cross_iter_deps:
        effects = _with_the_others(loop, declared)
        said: Any = {"streams": loop.streams, "effects": effects, "effort": EFFORT}
        threads = max(2, min(4, cores()), plan.threads)
        may_have = {name: result.workers(name) for name in result.host_s}
        stay: Sequence[str] = ()
        for workers in sorted({1, *may_have.values()}):
            limits = Limits(threads=threads, workers=workers, frozen=stay)
            try:
                best = auto_plan(plan, loop.costs, limits=limits, **said).plan
            except PlanError as error:
                why_not |= dict.fromkeys(plan.schedule, error.problems[0].text)
                break
            if workers == 1:
                best = _least_moved(plan, best, loop, effects)
                # The caller's thread has no others beside it: what it runs keeps one.
                stay = [n for n, e in best.schedule.items() if e.thread_group == DEFAULT_GROUP]
            if all(e.workers <= may_have.get(name, 1) for name, e in best.schedule.items()):
                yield best


def _least_moved(
    plan: PipelinePlan, best: PipelinePlan, loop: LoopFacts, effects: EffectTable
) -> PipelinePlan:
    """A plan with another group as the caller's, if fewer tasks move so, and it is as fast."""
    from swpipe.analysis import verify

    most_us, least = (1 + LEAST) * _predict(best, loop)[0], best
    for group in best.thread_groups:
        swap = {group: DEFAULT_GROUP, DEFAULT_GROUP: group}
        schedule = {
            name: replace(entry, thread_group=swap.get(entry.thread_group, entry.thread_group))
            for name, entry in best.schedule.items()
        }
        other = replace(best, schedule=schedule)
        if len(_moved(plan, other)) < len(_moved(plan, least)):
            with suppress(PlanError):  # what is not declared stays with the loop's body
                verify(other, effects=effects, streams=loop.streams)
                least = other if _predict(other, loop)[0] <= most_us else least
    return least


def _promise(result: Figures, moved: Sequence[str], then_s: float) -> Estimate:
    """How much shorter an iteration gets under a plan that is predicted to take so long."""
    each = [one for name in moved if (one := result.exposed(name)) is not None]
    # Together they save the sum at most, which is right if none hides another.
    most_s = sum(max(0.0, one.value_s) for one in each)
    error_s = max(result.baseline_spread_s, math.hypot(*(one.spread_s for one in each)))
    then_s = _at_least(result, then_s)
    return Estimate(min(result.baseline_s - then_s, most_s), error_s + ERROR * then_s)


def _predict(plan: PipelinePlan, loop: LoopFacts) -> tuple[float, str]:
    """Microseconds of an iteration, and what limits it, in short.

    Raises:
        PlanError: The plan cannot run, or is too large.
    """
    from swpipe.planning import simulate

    simulated = simulate(plan, loop.costs, streams=loop.streams)
    cores_us = 1e6 * ranks_on_machine() * loop.cpu_s / cores()
    if cores_us > simulated.ii_us:
        return cores_us, f"the {counted(cores(), 'core')}"
    return simulated.ii_us, _limit(simulated.limits)


def _limit(limit: Limit) -> str:
    """What limits an interval, in short: the simulator names every task and iteration."""
    tasks = [task for task in limit.tasks if task not in OWN]
    named = listed(tasks, _FEW)
    if limit.what:
        return f"{limit.what}, which is busy all the time ({named})" if tasks else limit.what
    if len(tasks) > 1:
        return f"{named}, which wait for each other from one iteration to the next"
    return f"{named} of the iteration before" if tasks else limit.text


# -------------------------------------------------------------------------------------- plans


def _in_one_stage(plan: PipelinePlan) -> PipelinePlan:
    """The plan's dependences, with all tasks and the pull on one thread, one after the other.

    Collectives stay ordered: what is advised may give them other threads.
    """
    return replace(
        plan,
        schedule={
            name: TaskSchedule(globally_ordered=entry.globally_ordered)
            for name, entry in plan.schedule.items()
        },
        same_period_deps=(),
        order=(),  # that of a pipeline may contradict the dependences within an iteration
        streams={},
        pipeline_depth=None,
        pull_group=None,
    )


def _ahead(plan: PipelinePlan, name: str) -> int:
    """How many iterations a task runs ahead of the last stage."""
    return plan.max_stage - plan.schedule[name].stage


def _moved(plan: PipelinePlan, best: PipelinePlan) -> list[str]:
    """The tasks that have another thread, or run more or less ahead."""
    moved = [
        name
        for name, entry in best.schedule.items()
        if entry.thread_group != plan.schedule[name].thread_group
        or entry.workers != plan.schedule[name].workers
        or _ahead(best, name) != _ahead(plan, name)
    ]
    return [PULL, *moved] if best.pull_group != plan.pull_group else moved


def _words(moved: Sequence[str], best: PipelinePlan, plan: PipelinePlan) -> str:
    """What to run where."""
    known = {*plan.thread_groups, DEFAULT_GROUP}
    places: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in moved:
        if name != PULL:
            places[best.schedule[name].thread_group, _ahead(best, name)].append(name)
    said = ["call the loader on a thread of its own"] if PULL in moved else []
    if len(places) > _MOST_PLACES:
        threads = counted(len({group for group, _ in places}), "thread")
        furthest = counted(max(ahead for _, ahead in places), "iteration")
        names = [name for some in places.values() for name in some]
        said.append(f"run {listed(names, _FEW)} on {threads}, up to {furthest} ahead")
        places.clear()
    for (group, ahead), names in places.items():
        workers = best.schedule[names[0]].workers
        where = f"thread {group!r}"
        if workers > 1:
            where = f"{workers} threads of {'its' if len(names) == 1 else 'their'} own"
        elif group not in known:
            where = f"a thread of {'its' if len(names) == 1 else 'their'} own"
        early = (
            f", {'one iteration' if ahead == 1 else f'{ahead} iterations'} ahead" if ahead else ""
        )
        said.append(f"run {listed(names, _FEW)} on {where}{early}")
    if best.depth > best.least_depth:
        said.append(f"have up to {best.depth} iterations in flight")
    return "; ".join(said)
