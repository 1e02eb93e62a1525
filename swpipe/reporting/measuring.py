"""What a report needs, measured one after the other, with all state restored.

    record     two iterations: what the tasks touch, and so which of them may overlap
    trace      some iterations, for the timeline and the critical path
    profile    the loop's iterations in their order, exposed times and advice, in the plain loop or
               under the plan
    try        the plans that are advised, in turns with the present one, over the loop's batches
    examine    what keeps work from overlapping, by the same profile

Where others use too much of the machine, the last two are left out: nothing would follow.
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
from swpipe.errors import PlanError
from swpipe.pipeline import SWPipeline
from swpipe.planning import simulate
from swpipe.profiler import Advice, ProfileResult, TaskProfiler
from swpipe.profiler.advice import MOST
from swpipe.profiler.contention import Contention, contention
from swpipe.profiler.measure import Pulls
from swpipe.profiler.rank_differences import rank_differences
from swpipe.profiler.rank_times import waited_for
from swpipe.profiler.sampling import MOST as MOST_SEEN
from swpipe.profiler.spread import Estimate, mean_of
from swpipe.profiler.trial import trial_state
from swpipe.reporting.account import Ceiling, account_of
from swpipe.reporting.examination import examine
from swpipe.reporting.rank_forecast import rank_forecast
from swpipe.reporting.step_report import PromisedChange, StepReport
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, keeps_order
from swpipe.tuning.budget import Window

NOW = "the present plan"

ROUNDS = 5
LEAST_ROUNDS = 3
"""Visits to each task, and trials of each plan: unless these take too long, and then at least."""

_PROFILE_S = 30.0
_TRIAL_S = 12.0
"""Too long: a report on a step of 100 ms takes a minute at most."""

_WARM_UP = 3  # iterations
_LEAST_TRACED = 12
_MOST_TRACED = 60
_TRACED_S = 3.0  # so that a few slow iterations do not decide
_LEAST_S = 1e-6


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
    rounds: int | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> StepReport:
    """Measure a loop, and report what bounds it, what overlap can still gain, and what to do next.

    It takes some tens of iterations for each task, and a minute at most where a step takes 100 ms.
    All state is restored, as after a profile.

    Args:
        tasks: In serial order.
        batches: Those that the loop goes through, in their order, at least one: of many a sample is
            taken, and the report says how much was seen.
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
            narrower. None: 5, or down to 3 where steps are long.
        progress: Called with one line before each step.

    Raises:
        ValueError: There are no batches, or ``rounds`` is below 2.
        PlanError: The plan cannot run with these tasks.
        BaseException: Whatever a task raised.
    """
    loop = Loop(tuple(tasks), batches, device, context=context, loader=loader, progress=progress)
    return report_on(loop, plan, name=name, ready_made=ready_made or {}, rounds=rounds)


def report_on(
    loop: Loop,
    plan: PipelinePlan | None,
    *,
    name: str,
    ready_made: Mapping[str, PipelinePlan],
    rounds: int | None = None,
) -> StepReport:
    """The report on a loop, of which more is said: its streams and its ranks; see ``report``."""
    # Tasks keep the streams and the global order of the plan that the loop runs under.
    loop = replace(loop.agreed(), like=loop.like if plan is None else plan)
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
        inferred,
        streams=loop.has_streams,
        cpu_s=cpu_s,
    )
    told = StepReport(
        *(account.parts, account.verdict, account.ceiling),
        name=name,
        plan=runs_under,
        changes=(),
        profile=profile,
        measured=trace,
        rank=rank,
        machine={
            "device": str(loop.device or ("accelerator" if loop.has_streams else "cpu")),
            "cores": str(cores()),
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
    )
    if any(loop.gather(told.cannot_tell)):
        return told
    costs = replace(profile.costs, memory=loop.measure_memory())
    predicted = None
    with suppress(PlanError):  # too large to simulate
        predicted = simulate(runs_under, costs, streams=loop.has_streams)
    memory = None if predicted is None else predicted.memory
    forecast = None
    if len(everyone) > 1 and any(entry.globally_ordered for entry in runs_under.schedule.values()):
        forecast = rank_forecast(
            runs_under,
            rank_differences([each.profile.costs for each in everyone], runs_under),
            streams=loop.has_streams,
            allowed=lambda one: keeps_order(loop, recording, one),
        )
    trials = _Trials(loop, runs_under, pulls, rounds, profile.baseline_s)
    changes, not_kept = trials.of_advice(profile, account.ceiling)
    in_vain = ""
    if not_kept and not any(one.advice.plan for one in changes):
        why = trials.why_in_vain(profile, not_kept)
        in_vain = why.text
        told = replace(told, ceiling=told.ceiling.after_trials(not_kept.values(), why.cause))
    if account.ceiling.is_worth_it and not any(one.advice.plan for one in changes):
        fitting = {
            name: replace(one, tasks=())
            for name, one in ready_made.items()
            if {*one.schedule} == {*runs_under.schedule}
            and dict(one.schedule) != dict(runs_under.schedule)
            and keeps_order(loop, recording, one)
        }
        tried = trials.saved(fitting)
        best = trials.best(fitting, tried)
        changes = (*best, *changes)[:MOST]
        not_kept = {**not_kept, **tried}
    loop.progress("looking for what keeps work from overlapping")
    findings = examine(loop, plan, found.profile)
    return replace(
        told,
        changes=changes,
        predicted=None if predicted is None else predicted.trace(),
        predicted_s=None if predicted is None else predicted.ii_us / 1e6,
        memory=memory if memory is not None and memory.bytes else None,
        findings=loop.gather(findings)[rank],
        not_kept=not_kept,
        in_vain=in_vain,
        forecast=forecast,
    )


class _Measured(NamedTuple):
    """``cpu_s`` is what an iteration takes of the cores, on all threads; 0 if it is not known."""

    profile: ProfileResult
    trace: Trace
    cpu_s: float


def _measure(
    loop: Loop, plan: PipelinePlan, rounds: int | None, pulls: Pulls | None, *, pipelined: bool
) -> _Measured:
    """A trace of some iterations, and a profile; the state is as before."""
    loop.progress("recording a timeline")
    with SWPipeline(
        plan, loop.tasks, device=loop.device, context=loop.context, check_effects=False
    ) as pipe:
        batches: Iterator[Any] = cycle(loop.batches)
        if pulls is not None:
            pulls.measure()
            batches = pulls.batches()
        with trial_state(pipe, loop.batches[0], None).trial(), pipe.borrow():
            pipe.run(islice(batches, _WARM_UP))
            timed_s = pipe.run(islice(batches, _WARM_UP)).seconds
            step_s = max(loop.gather(max(timed_s, _LEAST_S) / _WARM_UP))
            steps = min(_MOST_TRACED, max(_LEAST_TRACED, int(_TRACED_S / step_s)))
            if pulls is not None:
                steps = pulls.in_turns(steps)
                pulls.settle(steps, drain=True)
            begin_s = time.process_time()
            with pipe.trace() as trace:
                pipe.run(islice(batches, steps))
            cpu_s = (time.process_time() - begin_s) / steps
        loop.progress("measuring what each task costs the step")
        profile = TaskProfiler(pipe, loader=pulls).profile_loop(
            loop.batches,
            num_rounds=ROUNDS if rounds is None else rounds,
            pipelined=pipelined,
            seconds=_PROFILE_S if rounds is None else None,
        )
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


# ---------------------------------------------------------------------------------------- trials


class _Trials(NamedTuple):
    """Trials of plans in turns with the present one, of which a step takes ``step_s``."""

    loop: Loop
    plan: PipelinePlan
    pulls: Pulls | None
    rounds: int | None
    step_s: float

    def of_advice(
        self, profile: ProfileResult, ceiling: Ceiling
    ) -> tuple[tuple[PromisedChange, ...], dict[str, Estimate]]:
        """What is advised, with what the plans gave; and what those gave that saved nothing.

        No plan promises more than the ceiling.
        """
        plans = {one.change: one.plan for one in profile.advice if one.plan is not None}
        tried = self.saved(plans)
        not_kept = {change: saved for change, saved in tried.items() if not saved.is_clear}
        changes = []
        for each in profile.advice:
            most_s = min(each.saved_s, ceiling.saved_s) if each.plan else each.saved_s
            if each.change not in not_kept:
                one = replace(each, saved_s=most_s)
                changes.append(PromisedChange(one, tried.get(each.change)))
        return (*changes,), not_kept

    def saved(self, plans: Mapping[str, PipelinePlan]) -> dict[str, Estimate]:
        """How much shorter an iteration is under each of some plans."""
        if not plans:
            return {}
        self.loop.progress(f"trying {'; '.join(plans)}")
        every = {NOW: self.plan, **plans}
        window = self._window(1 + len(plans))
        turn_s = len(every) * window.iterations * self.step_s
        fits = int(_TRIAL_S / turn_s) if turn_s else ROUNDS
        turns = self.rounds or min(ROUNDS, max(LEAST_ROUNDS, fits))
        rounds = [self.loop.try_round(every, turn, self.pulls, window) for turn in range(turns)]
        return {name: mean_of([took_s[NOW] - took_s[name] for took_s in rounds]) for name in plans}

    def why_in_vain(self, profile: ProfileResult, tried: Mapping[str, Estimate]) -> Contention:
        """See what tasks wait for under a plan that was promised to save time, and did not."""
        loop = self.loop
        loop.progress("looking for what tasks share that does not show in their costs")
        plan = next(one.plan for one in profile.advice if one.plan and one.change in tried)
        said: Any = {"device": loop.device, "context": loop.context, "check_effects": False}
        with SWPipeline(plan, loop.tasks, **said) as pipe:
            saved = trial_state(pipe, loop.batches[0], None)
            with saved.trial(), pipe.borrow():
                batches = loop.batches.section(0, Window().num_measure)
                cpu_s = {name: profile.cpu_s(name) for name in profile.host_s}
                return contention(pipe, batches, profile.host_s, cpu_s, len(batches))

    def _window(self, plans: int) -> Window:
        """Return one through the loop's batches, or as many as fit."""
        round_s = LEAST_ROUNDS * plans * self.step_s
        fits = int(_TRIAL_S / round_s) if round_s else MOST_SEEN
        return self.loop.through(max(1, fits - Window().num_warmup))

    def best(
        self, plans: Mapping[str, PipelinePlan], tried: Mapping[str, Estimate]
    ) -> tuple[PromisedChange, ...]:
        """The plan that saved most, if that is more than nothing, and so again in its own trial.

        Of several the best one has had luck, too.
        """
        for name in sorted(tried, key=lambda name: -tried[name].value_s)[:1]:
            if tried[name].is_clear:
                again = self.saved({name: plans[name]})[name]
                if again.is_clear:
                    words = f"run it under the ready-made plan {name}"
                    advice = Advice(words, "", *tried[name], plan=plans[name])
                    return (PromisedChange(advice, again),)
        return ()
