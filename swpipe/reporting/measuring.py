"""The measurements for a report, taken one after the other, with all state restored.

    record     two iterations: what the tasks touch, and so which of them may overlap
    profile    the loop's iterations in their order, exposed times and advice, in the plain loop or
               under the plan
    trace      some iterations, for the timeline and the critical path
    try        the plan that is advised, alternately with the present one, on the loop's batches
    examine    what keeps work from overlapping, using the same profile

If other processes use too much of the machine, the last two are left out, since their results
would be meaningless. On several ranks each does the same; a step takes as long as on the slowest
rank. The report is about the rank that the other ranks wait for.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from swpipe._distributed.rank_checks import gather
from swpipe._distributed.shared_cores import cores
from swpipe.core.context import TypedContext
from swpipe.core.effects import EffectTable
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import PlanError
from swpipe.planning import simulate
from swpipe.profiler import TaskProfiler
from swpipe.profiler.contention import contention
from swpipe.profiler.rank_times import waited_for
from swpipe.profiler.spread import Estimate, mean_of
from swpipe.profiler.trial import trial
from swpipe.reporting.account import account_of
from swpipe.reporting.examination import examine
from swpipe.reporting.rank_forecast import rank_forecast
from swpipe.reporting.step_report import PromisedChange, StepReport
from swpipe.tuning.autotuning import Loop, keeps_order
from swpipe.tuning.budget import Window

NOW = "the present plan"
THEN = "the advised plan"

ROUNDS = 5
LEAST_ROUNDS = 3
"""Numbers of visits to each task and of trials of a plan: the default, and the least where steps
are long.
"""

_PROFILE_S = 30.0
_TRIAL_S = 12.0
"""Time limits in seconds, so that a report on a step of 100 ms takes a minute at most."""

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
        rounds: Visits to each task, and trials of a plan; 2 or more. More rounds make intervals
            narrower. None for 5, or down to 3 if steps are long.
        progress: Called with one line before each step.

    Raises:
        ValueError: There are no batches, or ``rounds`` is below 2.
        PlanError: The plan cannot run with these tasks.
        BaseException: Any exception of a task.
    """
    loop = Loop(tuple(tasks), batches, device, context=context, loader=loader, progress=progress)
    return report_on(loop, plan, name=name, rounds=rounds)


def report_on(
    loop: Loop, plan: PipelinePlan | None, *, name: str, rounds: int | None = None
) -> StepReport:
    """Return the report on a loop that carries its streams and ranks; see ``report``."""
    # Tasks keep the streams and the global order of the plan that the loop runs under.
    loop = replace(loop.agreed(), like=loop.like if plan is None else plan)
    recording = loop.record()
    inferred = _with_recurrences(loop.inferred_plan(recording), recording.effects)
    runs_under = inferred if plan is None else replace(plan, tasks=())
    own = _measured(loop, name, runs_under, inferred, rounds)
    # All ranks choose the same rank, since each has the times of all.
    ranks = own.profile.ranks
    rank = waited_for(ranks, own.profile.rank_waits) if ranks else 0
    page = replace(gather(own)[rank], rank=rank)
    # The ranks decide together, since the trials below are collective.
    if any(gather(page.cannot_tell)):
        return page
    page = _with_forecasts(page, loop, partial(keeps_order, loop, recording))
    page = _with_trial(page, loop, rounds)
    # The examination runs the loop serially, whatever plan the loop is under.
    loop.progress("looking for what keeps work from overlapping")
    findings = gather(examine(loop, plan, own.profile))[page.rank]
    return replace(page, findings=findings)


def _with_forecasts(
    page: StepReport, loop: Loop, allowed: Callable[[PipelinePlan], bool]
) -> StepReport:
    """Add what the simulator predicts of the plan: its memory, and its step on many ranks.

    ``allowed`` returns whether a plan keeps the numbers of the loop.
    """
    profile = page.profile
    streams = loop.has_streams
    costs = replace(profile.costs, memory=loop.measure_memory())
    with suppress(PlanError):  # too large to simulate
        memory = simulate(page.plan, costs, streams=streams).memory
        page = replace(page, memory=memory if memory and memory.bytes else None)
    differences = profile.differences
    if differences is None or not profile.collectives:
        return page
    forecast = rank_forecast(page.plan, differences, streams=streams, allowed=allowed)
    return replace(page, forecast=forecast)


def _measured(
    loop: Loop, name: str, plan: PipelinePlan, inferred: PipelinePlan, rounds: int | None
) -> StepReport:
    """Profile the loop, trace some iterations, and return the account of what this rank measured.

    Args:
        loop: The loop; its state is restored.
        name: The name of the loop in the report.
        plan: The plan that the loop runs under.
        inferred: The recorded dependences.
        rounds: See ``report``.
    """
    pulls = loop.pulls
    with loop.opened(plan) as pipe:
        loop.progress("measuring what each task costs the step")
        profile = TaskProfiler(pipe, loader=pulls).profile_loop(
            loop.batches,
            num_rounds=ROUNDS if rounds is None else rounds,
            pipelined=plan.depth > 1,  # an inferred plan is the plain loop
            seconds=_PROFILE_S if rounds is None else None,
        )
        loop.progress("recording a timeline")
        # Ranks must run the same number of iterations, so the slowest one determines it.
        step_s = max(gather(max(profile.baseline_s, _LEAST_S)))
        steps = min(_MOST_TRACED, max(_LEAST_TRACED, int(_TRACED_S / step_s)))
        steps = pulls.in_turns(steps)
        batches: Iterator[Any] = pulls.batches() if pulls.has_loader else cycle(loop.batches)
        with trial(pipe, loop.batches[0]):
            pulls.settle(steps)
            # CPU time of the process includes its own threads, but not the loader's worker
            # processes.
            begin_s = time.process_time()
            with pipe.trace() as trace:
                pipe.run(islice(batches, steps))
            cpu_s = (time.process_time() - begin_s) / steps
    # Threads of OpenMP may use a core while they wait, so with several of them the CPU time says
    # nothing.
    account = account_of(
        profile,
        trace.critical_path(),
        inferred,
        streams=loop.has_streams,
        cpu_s=cpu_s if torch.get_num_threads() == 1 else 0.0,
    )
    return StepReport(
        account.parts,
        account.verdict,
        account.ceiling,
        name=name,
        plan=plan,
        profile=profile,
        measured=trace,
        machine={
            "device": str(loop.device or ("accelerator" if loop.has_streams else "cpu")),
            "cores": str(cores()),
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
    )


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


def _with_trial(page: StepReport, loop: Loop, rounds: int | None) -> StepReport:
    """Return the report with the advised changes, and the trial of the plan among them.

    A profile advises at most one plan, and advises it first.
    """
    changes = tuple(map(PromisedChange, page.profile.advice))
    plan = changes[0].advice.plan if changes else None
    if plan is None:
        return replace(page, changes=changes)
    first = changes[0].advice
    loop.progress(f"trying {first.change}")
    tried = _saved(page, loop, plan, rounds)
    if tried.is_clear:
        # No plan promises more than the ceiling, or than its trial allows: costs do not show what
        # tasks slow down when they overlap, such as a cache or the memory's bandwidth.
        most_s = min(first.saved_s, page.ceiling.saved_s, tried.value_s + tried.spread_s)
        first = replace(first, saved=replace(first.saved, value_s=most_s))
        return replace(page, changes=(PromisedChange(first, tried), *changes[1:]))
    # The plan was promised to save time and did not. The ceiling is corrected, because the cause of
    # the failure limits other plans as well.
    loop.progress("looking for what tasks share that does not show in their costs")
    with loop.opened(plan) as pipe, trial(pipe, loop.batches[0]):
        batches = loop.batches.section(0, Window().num_measure)
        alone = {name: task.thread for name, task in page.profile.tasks.items()}
        why = contention(pipe, batches, alone)
    return replace(
        page,
        changes=changes[1:],
        in_vain=f"{first.change}: saved {tried.text} ms. {why.text}",
        ceiling=page.ceiling.after_trial(tried, why.cause),
    )


def _saved(page: StepReport, loop: Loop, plan: PipelinePlan, rounds: int | None) -> Estimate:
    """Return how much shorter an iteration is under another plan than under the present one."""
    plans = {NOW: page.plan, THEN: plan}
    # Long steps get shorter windows, through fewer of the batches, and then fewer rounds. All
    # ranks have the same page, so they run the same iterations.
    fits = int(_TRIAL_S / (len(plans) * page.profile.baseline_s))
    window = loop.through(max(1, fits // LEAST_ROUNDS - Window().num_warmup))
    turns = rounds or min(ROUNDS, max(LEAST_ROUNDS, fits // window.iterations))
    took_s = [loop.try_round(plans, turn, window) for turn in range(turns)]
    # Differences are taken within a round, where the machine was in the same state.
    return mean_of([each[NOW] - each[THEN] for each in took_s])
