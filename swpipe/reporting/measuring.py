"""What a report needs, measured one after the other, with all state restored.

    record     two iterations: what the tasks touch, and so which of them may overlap
    profile    exposed times and advice, in the plain loop or under the plan
    trace      some more iterations, for the timeline and the critical path
    doctor     what keeps work from overlapping, by the same profile
    try        the plans that are advised, in turns with the present one

On several ranks each does the same; a step takes as long as on the slowest rank. The report is of
the rank that the others wait for.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from swpipe._distributed.shared_cores import cores
from swpipe.core.context import TypedContext
from swpipe.core.effects import EffectTable
from swpipe.core.keywords import suggests_keywords
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.doctor import diagnose
from swpipe.errors import PlanError
from swpipe.pipeline import SWPipeline
from swpipe.planning import simulate
from swpipe.profiler import Advice, ProfileResult, TaskProfiler, try_plans
from swpipe.profiler.advice import MOST
from swpipe.profiler.measure import Pulls
from swpipe.profiler.rank_times import waited_for
from swpipe.profiler.spread import Estimate, mean_of
from swpipe.profiler.trial_state import trial_state
from swpipe.reporting.account import Ceiling, account_of
from swpipe.reporting.step_report import PromisedChange, StepReport
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, keeps_order

NOW = "the present plan"

ROUNDS = 5
"""Visits to each task, and trials of each plan."""

_WARM_UP = 3
_LEAST_TRACED, _MOST_TRACED = 12, 60
_TRACED_S = 1.0  # so that a few slow iterations do not decide


@suggests_keywords
def report(
    tasks: Iterable[PipelineTask],
    batches: Iterable[Any],
    *,
    plan: PipelinePlan | None = None,
    name: str = "loop",
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    loader: Iterable[Any] | None = None,
    ready_made: Mapping[str, PipelinePlan] | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[str], object] = lambda line: None,
) -> StepReport:
    """Measure a loop, and report what bounds it, what overlap can still gain, and what to do next.

    It takes some tens of iterations for each task. All state is restored, as after a profile.

    Args:
        tasks: In serial order.
        batches: At least one; more show how batches differ.
        plan: What it runs under; None for the plain loop.
        name: What the report calls it.
        device: As for ``SWPipeline``.
        context: As for ``SWPipeline``.
        loader: What training takes its batches from, such as a ``DataLoader``: its calls are
            measured, too. With None a batch costs nothing.
        ready_made: Name to plan, such as those of ``swpipe.plans.torchrec.sparse_dist``. They are
            tried where nothing else is advised but to make tasks faster; not those for other tasks,
            and those that could give other numbers than the serial loop.
        rounds: Visits to each task, and trials of each plan; 2 or more. More make intervals
            narrower.
        progress: Called with one line before each step.

    Raises:
        ValueError: There are no batches, or ``rounds`` is below 2.
        PlanError: The plan cannot run with these tasks.
        BaseException: Whatever a task raised.
    """
    loop = Loop(
        tuple(tasks), list(batches), device, context=context, loader=loader, progress=progress
    )
    return report_on(loop, plan, name=name, ready_made=ready_made or {}, rounds=rounds)


def report_on(
    loop: Loop,
    plan: PipelinePlan | None,
    *,
    name: str,
    ready_made: Mapping[str, PipelinePlan],
    rounds: int = ROUNDS,
) -> StepReport:
    """The report on a loop, of which more is said: its streams and its ranks; see ``report``."""
    recording = loop.record()
    inferred = _with_recurrences(loop.inferred_plan(recording), recording.effects)
    runs_under = inferred if plan is None else replace(plan, tasks=())
    pulls = Pulls.of(loop.loader)
    pipelined = plan is not None and plan.depth > 1
    found = _measure(loop, runs_under, rounds, pulls, pipelined=pipelined)
    everyone: list[_Measured] = loop.gather(found)
    of_ranks = found.profile.ranks
    rank = waited_for(of_ranks, found.profile.rank_waits) if of_ranks else 0
    profile, trace, cpu_s = everyone[rank]
    account = account_of(
        profile,
        trace.critical_path(),
        _ordered_like(inferred, runs_under),
        streams=loop.has_streams,
        cpu_s=cpu_s,
    )
    costs = replace(profile.costs, memory=loop.measure_memory())
    predicted = None
    with suppress(PlanError):  # too large to simulate
        predicted = simulate(runs_under, costs, streams=loop.has_streams)
    memory = None if predicted is None else predicted.memory
    changes, not_kept = _tried(loop, runs_under, profile, account.ceiling, rounds, pulls)
    if account.ceiling.is_worth_it and not any(one.advice.plan for one in changes):
        fitting = {
            name: replace(one, tasks=())
            for name, one in ready_made.items()
            if {*one.schedule} == {*runs_under.schedule}
            and dict(one.schedule) != dict(runs_under.schedule)
            and keeps_order(loop, recording, one)
        }
        tried = _trial(loop, runs_under, fitting, rounds, pulls)
        best = _best(loop, runs_under, fitting, tried, rounds, pulls)
        changes, not_kept = (*best, *changes)[:MOST], {**not_kept, **tried}
    loop.progress("looking for what keeps work from overlapping")
    findings = diagnose(
        loop.tasks,
        loop.batches if loop.loader is None else loop.loader,
        plan=plan,
        device=loop.device,
        context=loop.context,
        profile=found.profile,
    ).findings
    return StepReport(
        name=name,
        plan=runs_under,
        account=account,
        changes=changes,
        profile=profile,
        measured=trace,
        predicted=None if predicted is None else predicted.trace(),
        predicted_s=None if predicted is None else predicted.ii_us / 1e6,
        memory=memory if memory is not None and memory.bytes else None,
        # Whether the machine is busy is said first, of the time in which the profile was taken.
        findings=tuple(o for o in loop.gather(findings)[rank] if o.rule != "busy-machine"),
        rank=rank,
        machine={
            "device": str(loop.device or ("accelerator" if loop.has_streams else "cpu")),
            "cores": str(cores()),
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
        not_kept=not_kept,
    )


class _Measured(NamedTuple):
    """``cpu_s`` is what an iteration takes of the cores, on all threads; 0 if it is not known."""

    profile: ProfileResult
    trace: Trace
    cpu_s: float


def _measure(
    loop: Loop, plan: PipelinePlan, rounds: int, pulls: Pulls | None, *, pipelined: bool
) -> _Measured:
    """A profile, and a trace of more iterations; the state is as before."""
    loop.progress("measuring what each task costs the step")
    with SWPipeline(
        plan, loop.tasks, device=loop.device, context=loop.context, check_effects=False
    ) as pipe:
        profile = TaskProfiler(pipe).profile(
            loop.batches[0], num_rounds=rounds, pipelined=pipelined, loader=pulls
        )
        loop.progress("recording a timeline")
        wanted = int(_TRACED_S / profile.baseline_s) if profile.baseline_s else _MOST_TRACED
        steps = max(loop.gather(min(_MOST_TRACED, max(_LEAST_TRACED, wanted))))
        batches: Iterator[Any] = cycle(loop.batches)
        if pulls is not None:
            steps = pulls.in_turns(steps)
            pulls.settle(_WARM_UP + steps, drain=True)
            batches = pulls.batches()
        with trial_state(pipe, loop.batches[0], None).trial(), pipe.borrow():
            pipe.run(islice(batches, _WARM_UP))
            begin_s = time.process_time()
            with pipe.trace() as trace:
                pipe.run(islice(batches, steps))
            cpu_s = (time.process_time() - begin_s) / steps
    # Threads of OpenMP may use a core while they wait.
    return _Measured(profile, trace, cpu_s if torch.get_num_threads() == 1 else 0.0)


def _with_recurrences(inferred: PipelinePlan, effects: EffectTable) -> PipelinePlan:
    """The plan, with a dependence of each task on itself that an earlier iteration's state needs.

    Threads keep that order anyway, so a recording leaves it out; but it says what may not move.
    """
    written = [
        (name, name, 1)
        for name in inferred.schedule
        if any(place.persistent for place in effects[name].writes)
    ]
    return replace(inferred, cross_iter_deps=(*inferred.cross_iter_deps, *written))


def _ordered_like(inferred: PipelinePlan, plan: PipelinePlan) -> PipelinePlan:
    """The inferred plan, with what another one says about the global order as well."""
    ordered = {name for name, entry in plan.schedule.items() if entry.globally_ordered}
    schedule = {
        name: replace(entry, globally_ordered=entry.globally_ordered or name in ordered)
        for name, entry in inferred.schedule.items()
    }
    return replace(inferred, schedule=schedule)


# ---------------------------------------------------------------------------------------- trials


def _tried(
    loop: Loop,
    plan: PipelinePlan,
    profile: ProfileResult,
    ceiling: Ceiling,
    rounds: int,
    pulls: Pulls | None,
) -> tuple[tuple[PromisedChange, ...], dict[str, Estimate]]:
    """What is advised, with what the advised plans gave; and what those gave that saved nothing.

    No plan promises more than the ceiling.
    """
    plans = {each.change: PipelinePlan.from_json(each.plan) for each in profile.advice if each.plan}
    tried = _trial(loop, plan, plans, rounds, pulls)
    not_kept = {change: saved for change, saved in tried.items() if not saved.is_clear}
    changes = []
    for each in profile.advice:
        most_s = min(each.saved_s, ceiling.saved_s) if each.plan else each.saved_s
        if each.change not in not_kept:
            one = replace(each, saved_s=most_s)
            changes.append(PromisedChange(one, tried.get(each.change)))
    return (*changes,), not_kept


def _trial(
    loop: Loop,
    plan: PipelinePlan,
    plans: Mapping[str, PipelinePlan],
    rounds: int,
    pulls: Pulls | None,
) -> dict[str, Estimate]:
    """How much shorter an iteration is under each of some plans, in turns with the present one."""
    if plans:
        loop.progress(f"trying {'; '.join(plans)}")
    saved: dict[str, list[float]] = {change: [] for change in plans}
    for turn in range(rounds if plans else 0):
        own_s = try_plans(
            loop.tasks,
            {NOW: plan, **plans} if turn % 2 else {**plans, NOW: plan},
            [loop.batches[turn % len(loop.batches)]],
            device=loop.device,
            context=loop.context,
            loader=pulls,
        )
        all_s: list[Mapping[str, float]] = loop.gather(own_s)
        step_s = {name: max(rank_s[name] for rank_s in all_s) for name in own_s}
        for change in plans:
            saved[change].append(step_s[NOW] - step_s[change])
    return {change: mean_of(differences) for change, differences in saved.items()}


def _best(
    loop: Loop,
    plan: PipelinePlan,
    plans: Mapping[str, PipelinePlan],
    tried: Mapping[str, Estimate],
    rounds: int,
    pulls: Pulls | None,
) -> tuple[PromisedChange, ...]:
    """The plan that saved most, if that is more than nothing, and so again in a trial of its own.

    Of several the best one has had luck, too.
    """
    for name in sorted(tried, key=lambda name: -tried[name].value_s)[:1]:
        if tried[name].is_clear:
            again = _trial(loop, plan, {name: plans[name]}, rounds, pulls)[name]
            if again.is_clear:
                words = f"run it under the ready-made plan {name}"
                advice = Advice(words, "", *tried[name], plan=plans[name].to_json())
                return (PromisedChange(advice, again),)
    return ()
