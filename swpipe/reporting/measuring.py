"""The measurements for a report, taken one after the other, with all state restored.

    record     two iterations: what the tasks touch, and so which of them may overlap
    trace      some iterations, for the timeline and the critical path
    profile    the loop's iterations in their order, exposed times and advice, in the plain loop or
               under the plan
    try        the plans that are advised, alternately with the present one, on the loop's batches
    examine    what keeps work from overlapping, using the same profile

If other processes use too much of the machine, the last two are left out, since their results
would be meaningless. On several ranks each does the same; a step takes as long as on the slowest
rank. The report is about the rank that the other ranks wait for.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from swpipe._distributed.shared_cores import cores
from swpipe.core.context import TypedContext
from swpipe.core.effects import EffectTable
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import PlanError
from swpipe.planning import simulate
from swpipe.profiler import Advice, ProfileResult, TaskProfiler
from swpipe.profiler.advice import MOST
from swpipe.profiler.contention import Contention, contention
from swpipe.profiler.measure import Pulls
from swpipe.profiler.rank_times import waited_for
from swpipe.profiler.sampling import MOST as MOST_SEEN
from swpipe.profiler.spread import Estimate, mean_of
from swpipe.profiler.trial import trial
from swpipe.reporting.account import account_of
from swpipe.reporting.examination import examine
from swpipe.reporting.rank_forecast import rank_forecast
from swpipe.reporting.step_report import PromisedChange, StepReport
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, keeps_order
from swpipe.tuning.budget import Window

NOW = "the present plan"

ROUNDS = 5
LEAST_ROUNDS = 3
"""Numbers of visits to each task and of trials of each plan: the default, and the least where steps
are long.
"""

_PROFILE_S = 30.0
_TRIAL_S = 12.0
"""Time limits in seconds, so that a report on a step of 100 ms takes a minute at most."""

_WARM_UP = 3  # iterations
_LEAST_TRACED = 12
_MOST_TRACED = 60
_TRACED_S = 3.0  # long enough that a few slow iterations do not dominate
_LEAST_S = 1e-6


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

    It runs some tens of iterations for each task, which take at most a minute if a step takes 100
    ms. All state is restored, as after a profile.

    Args:
        tasks: The tasks in serial order.
        batches: The batches of the loop in order, at least one. A sample is taken if there are
            many, and the report says how many batches were used.
        plan: The plan that the loop runs under; None for the plain loop.
        name: The name of the loop in the report.
        device: See ``SWPipeline``.
        context: See ``SWPipeline``.
        loader: The object that training takes its batches from, such as a ``DataLoader``. Its calls
            are measured too. If None, batches cost nothing.
        ready_made: Name to plan, for example those of ``swpipe.plans.torchrec.sparse_dist``. They
            are tried if the only other advice is to make tasks faster. Plans for other tasks are
            not tried, nor plans that could give other numbers than the serial loop.
        rounds: Visits to each task, and trials of each plan; 2 or more. More rounds make intervals
            narrower. None for 5, or down to 3 if steps are long.
        progress: Called with one line before each step.

    Raises:
        ValueError: There are no batches, or ``rounds`` is below 2.
        PlanError: The plan cannot run with these tasks.
        BaseException: Any exception of a task.
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
    """Return the report on a loop that carries its streams and ranks; see ``report``."""
    # Tasks keep the streams and the global order of the plan that the loop runs under.
    loop = replace(loop.agreed(), like=loop.like if plan is None else plan)
    recording = loop.record()
    inferred = _with_recurrences(loop.inferred_plan(recording), recording.effects)
    runs_under = inferred if plan is None else replace(plan, tasks=())
    pulls = Pulls.of(loop.loader)
    own = _measure(loop, runs_under, rounds, pulls)
    page = _page_of(loop, name, runs_under, inferred, own)
    # The ranks decide together, since the trials below are collective.
    if any(loop.gather(page.cannot_tell)):
        return page
    allowed = partial(keeps_order, loop, recording)
    page = _with_predictions(page, loop, allowed)
    fitting = {
        name: replace(other, tasks=())
        for name, other in ready_made.items()
        if {*other.schedule} == {*runs_under.schedule}
        and dict(other.schedule) != dict(runs_under.schedule)
        and allowed(other)
    }
    page = _Trials(loop, page, pulls, rounds).of_changes(fitting)
    # The examination runs the loop serially, whatever plan the loop is under.
    loop.progress("looking for what keeps work from overlapping")
    findings = loop.gather(examine(loop, plan, own.profile))[page.rank]
    return replace(page, findings=findings)


def _page_of(
    loop: Loop, name: str, plan: PipelinePlan, inferred: PipelinePlan, own: _Measured
) -> StepReport:
    """Return the account of what was measured on the rank that the other ranks wait for.

    Args:
        loop: The loop.
        name: The name of the loop in the report.
        plan: The plan that the loop runs under.
        inferred: The recorded dependences.
        own: The measurements of this rank.
    """
    # All ranks exchange their measurements, and choose the same rank.
    everyone: list[_Measured] = loop.gather(own)
    of_ranks = own.profile.ranks
    rank = waited_for(of_ranks, own.profile.rank_waits) if of_ranks else 0
    profile, trace, cpu_s = everyone[rank]
    streams = loop.has_streams
    account = account_of(profile, trace.critical_path(), inferred, streams=streams, cpu_s=cpu_s)
    return StepReport(
        account.parts,
        account.verdict,
        account.ceiling,
        name=name,
        plan=plan,
        changes=(),
        profile=profile,
        measured=trace,
        rank=rank,
        machine={
            "device": str(loop.device or ("accelerator" if streams else "cpu")),
            "cores": str(cores()),
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
    )


def _with_predictions(
    page: StepReport, loop: Loop, allowed: Callable[[PipelinePlan], bool]
) -> StepReport:
    """Add what the simulator predicts of the plan: its timeline, its memory, and many ranks.

    ``allowed`` returns whether a plan keeps the numbers of the loop.
    """
    profile = page.profile
    streams = loop.has_streams
    costs = replace(profile.costs, memory=loop.measure_memory())
    with suppress(PlanError):  # too large to simulate
        predicted = simulate(page.plan, costs, streams=streams)
        memory = predicted.memory
        page = replace(
            page,
            predicted=predicted.trace(),
            predicted_s=predicted.ii_us / 1e6,
            memory=memory if memory is not None and memory.bytes else None,
        )
    differences = profile.differences
    if differences is None or not profile.collectives:
        return page
    forecast = rank_forecast(page.plan, differences, streams=streams, allowed=allowed)
    return replace(page, forecast=forecast)


class _Measured(NamedTuple):
    """The measurements of one rank.

    ``cpu_s`` is the CPU time of an iteration on all threads; 0 if unknown.
    """

    profile: ProfileResult
    trace: Trace
    cpu_s: float


def _measure(loop: Loop, plan: PipelinePlan, rounds: int | None, pulls: Pulls) -> _Measured:
    """Trace some iterations and profile the loop, and restore the state."""
    loop.progress("recording a timeline")
    with loop.opened(plan) as pipe:
        pulls.measure()
        batches: Iterator[Any] = pulls.batches() if pulls.has_loader else cycle(loop.batches)
        with trial(pipe, loop.batches[0]):
            pipe.run(islice(batches, _WARM_UP))
            timed_s = pipe.run(islice(batches, _WARM_UP)).seconds
            # Ranks must run the same number of iterations, so the slowest one determines it.
            step_s = max(loop.gather(max(timed_s, _LEAST_S) / _WARM_UP))
            steps = min(_MOST_TRACED, max(_LEAST_TRACED, int(_TRACED_S / step_s)))
            steps = pulls.in_turns(steps)
            pulls.settle(steps, drain=True)
            # CPU time of the process includes its own threads, but not the loader's worker
            # processes.
            begin_s = time.process_time()
            with pipe.trace() as trace:
                pipe.run(islice(batches, steps))
            cpu_s = (time.process_time() - begin_s) / steps
        loop.progress("measuring what each task costs the step")
        profile = TaskProfiler(pipe, loader=pulls).profile_loop(
            loop.batches,
            num_rounds=ROUNDS if rounds is None else rounds,
            pipelined=plan.depth > 1,  # an inferred plan is the plain loop
            seconds=_PROFILE_S if rounds is None else None,
        )
    # Threads of OpenMP may use a core while they wait, so with several of them the CPU time says
    # nothing.
    return _Measured(profile, trace, cpu_s if torch.get_num_threads() == 1 else 0.0)


def _with_recurrences(inferred: PipelinePlan, effects: EffectTable) -> PipelinePlan:
    """Return the plan, with a dependence of each task that writes persistent state on itself.

    Threads keep that order anyway, so a recording leaves it out. Here it marks the tasks that
    depend on earlier iterations.
    """
    written = [
        (name, name, 1)
        for name in inferred.schedule
        if any(place.persistent for place in effects[name].writes)
    ]
    return replace(inferred, cross_iter_deps=(*inferred.cross_iter_deps, *written))


# ---------------------------------------------------------------------------------------- trials


class _Trials(NamedTuple):
    """Trials of plans for a report, alternately with the present plan."""

    loop: Loop
    page: StepReport
    pulls: Pulls
    rounds: int | None

    def of_changes(self, ready_made: Mapping[str, PipelinePlan]) -> StepReport:
        """Return the report with the advised changes, their trials, and plans that saved nothing.

        Ready-made plans are a fallback: they are tried only if the advice contains no plan but the
        ceiling says that one could help.
        """
        page = self.page
        profile = page.profile
        ceiling = page.ceiling
        plans = {each.change: each.plan for each in profile.advice if each.plan is not None}
        tried = self.saved(plans)
        not_kept = {change: saved for change, saved in tried.items() if not saved.is_clear}
        changes = []
        for each in profile.advice:
            # No plan promises more than the ceiling.
            most_s = min(each.saved_s, ceiling.saved_s) if each.plan else each.saved_s
            # A change without a plan cannot be tried, so it stays with its promise alone.
            if each.change not in not_kept:
                advice = replace(each, saved=replace(each.saved, value_s=most_s))
                changes.append(PromisedChange(advice, tried.get(each.change)))
        if any(change.advice.plan for change in changes):
            return replace(page, changes=(*changes,), not_kept=not_kept)
        # A plan was promised to save time and did not. The ceiling is corrected, because the cause
        # of the failure limits other plans as well.
        if not_kept:
            why = self.why_in_vain(not_kept)
            corrected = ceiling.after_trials(not_kept.values(), why.cause)
            page = replace(page, in_vain=why.text, ceiling=corrected)
        if ceiling.is_worth_it:
            tried = self.saved(ready_made)
            changes = [*self.best(ready_made, tried), *changes][:MOST]
            not_kept |= tried
        return replace(page, changes=(*changes,), not_kept=not_kept)

    def saved(self, plans: Mapping[str, PipelinePlan]) -> dict[str, Estimate]:
        """Return how much shorter an iteration is under each of the plans."""
        if not plans:
            return {}
        self.loop.progress(f"trying {'; '.join(plans)}")
        every = {NOW: self.page.plan, **plans}
        # Long steps get shorter windows, through fewer of the batches, and then fewer rounds. All
        # ranks have the same page, so they run the same iterations.
        each_s = len(every) * self.page.profile.baseline_s
        fits = int(_TRIAL_S / each_s) if each_s else LEAST_ROUNDS * MOST_SEEN
        window = self.loop.through(max(1, fits // LEAST_ROUNDS - Window().num_warmup))
        turns = self.rounds or min(ROUNDS, max(LEAST_ROUNDS, fits // window.iterations))
        rounds = [self.loop.try_round(every, turn, self.pulls, window) for turn in range(turns)]
        # Differences are taken within a round, where the machine was in the same state.
        return {name: mean_of([took_s[NOW] - took_s[name] for took_s in rounds]) for name in plans}

    def why_in_vain(self, tried: Collection[str]) -> Contention:
        """Run a plan that did not save the promised time, and return what its tasks wait for."""
        loop = self.loop
        profile = self.page.profile
        loop.progress("looking for what tasks share that does not show in their costs")
        # The first plan of the advice promised most, so its failure is the most informative.
        plan = next(each.plan for each in profile.advice if each.plan and each.change in tried)
        with loop.opened(plan) as pipe, trial(pipe, loop.batches[0]):
            batches = loop.batches.section(0, Window().num_measure)
            alone = {name: task.thread for name, task in profile.tasks.items()}
            return contention(pipe, batches, alone)

    def best(
        self, plans: Mapping[str, PipelinePlan], tried: Mapping[str, Estimate]
    ) -> tuple[PromisedChange, ...]:
        """Return the best plan, if it saved time both in the comparison and in a trial of its own.

        The best of several plans was also lucky, so its first result is too high.
        """
        clear = {name: saved for name, saved in tried.items() if saved.is_clear}
        if not clear:
            return ()
        name = max(clear, key=lambda name: clear[name].value_s)
        # The second trial does not depend on the selection, so its result is unbiased.
        again = self.saved({name: plans[name]})[name]
        words = f"run it under the ready-made plan {name}"
        advice = Advice(words, "", tried[name], plan=plans[name])
        return (PromisedChange(advice, again),) if again.is_clear else ()
