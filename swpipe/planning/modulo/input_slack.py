"""Input slack: the number of batches made ahead of the first collective.

    stage      0        1        2        3
    slack 0    read  -> dist  -> train             dist(i+1) waits whenever a rank reads slowly
    slack 1    read  ----------> dist  -> train    one slow batch on any rank goes unnoticed

More iterations in flight after the first collective gain nothing, because the ranks have met there.
Before it each rank works ahead by itself, and also if the host may launch further ahead of the
device (``run_ahead``). If some ranks are always slower than others, neither helps.

The largest plan is simulated first, to see what can be gained; then the smallest plan that gains as
much is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.resolved import dependences_of, resolve_plan
from swpipe.errors import PlanError
from swpipe.planning.limits import Limits
from swpipe.planning.rank_simulation import step_us
from swpipe.planning.ranks import Ranks
from swpipe.program import compile_plan

_AS_GOOD = 0.005
"""The relative difference in step time below which two plans count as equally good."""

_RUN_AHEAD = (2, 4)
"""The values of ``run_ahead`` that are tried, besides that of the plan."""

_GROUPS = ("input", *(f"input {k}" for k in range(2, 1_002)))


class SlackPlan(NamedTuple):
    """A plan with input slack: the number of batches, and the step of the ranks in microseconds."""

    plan: PipelinePlan
    slack: int
    step_us: float

    @property
    def words(self) -> str:
        """The means by which the plan absorbs slow iterations, in words."""
        batches = f"{self.slack} batch{'es' if self.slack > 1 else ''} of input slack"
        parts = [batches] * bool(self.slack)
        parts += [f"run_ahead={self.plan.run_ahead}"] * (self.plan.run_ahead is not None)
        return " and ".join(parts) or "another order"


def with_slack(
    plan: PipelinePlan,
    costs: CostModel,
    ranks: Ranks,
    limits: Limits,
    *,
    streams: bool,
    may_run_ahead: bool,
    allowed: Callable[[PipelinePlan], bool],
) -> tuple[SlackPlan, str]:
    """Return the smallest plan that absorbs slow iterations as well as any, and the reason.

    Args:
        plan: A plan for one rank.
        costs: A cost for each task.
        ranks: The ranks, whose times differ.
        limits: The limits on the plan.
        streams: Whether the device has streams.
        may_run_ahead: Whether ``run_ahead`` may be changed.
        allowed: Returns whether a plan that can run may be chosen.
    """

    def simulated(candidate: PipelinePlan, slack: int) -> SlackPlan:
        program = compile_plan(resolve_plan(candidate), streams=streams)
        return SlackPlan(candidate, slack, step_us(program, costs, ranks))

    def trials(candidates: Iterable[tuple[PipelinePlan, int]]) -> Iterator[SlackPlan]:
        return (simulated(*candidate) for candidate in candidates if allowed(candidate[0]))

    ahead = _RUN_AHEAD if streams and may_run_ahead and plan.names_streams else ()
    given = simulated(plan, 0)
    candidates = [
        (candidate, slack)
        for slack in range(limits.in_flight - plan.depth + 1)
        for run_ahead in (plan.run_ahead, *ahead)
        for candidate in _plans(replace(plan, run_ahead=run_ahead), costs, ranks, limits, slack)
        if candidate != plan
    ]
    # Smallest first: by iterations on the way to the device, then by batches of slack. So
    # ``run_ahead``, which keeps the plan's depth, is preferred to as much slack.
    candidates.sort(key=lambda candidate: (ahead_of(candidate[0]), candidate[1]))
    # The largest plan that is allowed absorbs most, so it shows what can be gained. A simulation of
    # ranks takes long: the search stops at the first plan that is as good.
    largest = islice(trials(reversed(candidates)), 1)
    goal_us = min(trial.step_us for trial in (given, *largest)) * (1 + _AS_GOOD)
    best = next(each for each in chain([given], trials(candidates)) if each.step_us <= goal_us)
    if best is given:
        return best, "More input slack takes no waiting away."
    saved = in_ms(given.step_us - best.step_us)
    return best, f"With {best.words} the step of {ranks.number:,} ranks is {saved} shorter."


def ahead_of(plan: PipelinePlan) -> int:
    """Return the number of iterations from the last that the device has finished to the newest."""
    return plan.depth + (plan.launch_limit or 0)


def _plans(
    plan: PipelinePlan, costs: CostModel, ranks: Ranks, limits: Limits, slack: int
) -> Iterator[PipelinePlan]:
    """Yield plans with their input made further ahead, in their own order and in the engine's."""
    for tasks in _inputs(plan, costs, ranks, limits):
        if not tasks and slack and plan.pull_group is None:
            # The caller's thread pulls, at the begin of each iteration: it cannot pull further
            # ahead.
            continue
        schedule = {
            name: entry if name in tasks else replace(entry, stage=entry.stage + slack)
            for name, entry in plan.schedule.items()
        }
        groups = {schedule[name].thread_group for name in tasks}
        shared = any(e.thread_group in groups for n, e in schedule.items() if n not in tasks)
        # The threads of workers are of one group.
        if slack and shared and len(plan.thread_groups) < limits.groups:
            # On a thread with a task that meets other ranks, the input would wait for the slowest
            # rank.
            group = next(name for name in _GROUPS if name not in plan.thread_groups)
            schedule |= {name: replace(schedule[name], thread_group=group) for name in tasks}
        for order in (plan.order, ()):
            changed = replace(
                plan, schedule=schedule, pipeline_depth=plan.depth + slack, order=order
            )
            try:
                validate(changed)
            except PlanError:
                # The input depends on later tasks, which does not allow these stages.
                continue
            yield changed


def _inputs(
    plan: PipelinePlan, costs: CostModel, ranks: Ranks, limits: Limits
) -> Sequence[set[str]]:
    """Return sets of tasks that may be moved ahead together: the slow ones and their producers.

    They come before the first task that meets other ranks, and do not depend on later tasks. An
    empty set stands for the pull alone: then all tasks are moved to later stages.
    """
    deps = [(d.consumer, d.producer) for d in dependences_of(plan)]
    # Pairs of ``same_period_deps`` keep their distance, so both tasks move or neither does.
    tied = [(c, p) for c, p in plan.same_period_deps] + [(p, c) for c, p in plan.same_period_deps]
    deps += tied
    before = {*plan.schedule} - {*ranks.meeting(plan, costs), *limits.frozen}
    # Remove tasks that depend on a removed one, until nothing changes.
    while late := {c for c, p in deps if c in before and p not in before}:
        before -= late
    slow = before & {*ranks.slow}
    while needed := {p for c, p in deps if c in slow} - slow:
        slow |= needed
    inputs = [slow] if slow else []
    inputs += [set()] * (PULL in ranks.slow)
    return inputs or [before]
