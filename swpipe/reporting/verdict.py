"""The verdict on a loop: what bounds its step, and how much any overlap can still gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.messages import counted, listed
from swpipe.core.plan import PipelinePlan
from swpipe.planning import lower_bounds
from swpipe.profiler import ProfileResult
from swpipe.reporting.step_parts import CAUSES, Cause, Roles, StepPart

Bound: TypeAlias = Literal[
    "input-bound", "host-bound", "collective-bound", "compute-bound", "balanced"
]

MOST = 0.5
"""The part of a step that has to be spent on one thing for the verdict to name it."""

WORTH = 0.02
"""A ceiling below this part of a step is none: it is not known so well."""

_WORDS: Mapping[Cause, str] = {
    "input": "waits for its input",
    "host": "waits for the host",
    "collective": "waits for other ranks",
    "compute": "computes",
}
_NAMED = 3  # tasks


@dataclass(frozen=True, slots=True)
class Ceiling:
    """How much any overlap can gain at most: no plan for these tasks makes a step shorter.

    Attributes:
        floor_s: The least time of a step, in seconds.
        limit: What sets it, in words.
        beside: The tasks that have to run at the same time as what sets it, the longest first.
        saved_s: The time of a step, less ``floor_s``.
        spread_s: Half-width of the 95% interval of the step's time.
        share: ``saved_s``, as a part of the step; from 0 to 1.
    """

    floor_s: float
    limit: str
    beside: tuple[str, ...]
    saved_s: float
    spread_s: float
    share: float

    @property
    def needs(self) -> str:
        """What a plan has to do to reach it, in a sentence."""
        if not self.beside:
            return "To reach it, all cores have to be busy all the time."
        return f"To reach it, {listed(self.beside, _NAMED)} must run beside that, on other threads."

    @property
    def is_worth_it(self) -> bool:
        """Whether there is something to gain that can be told apart from nothing."""
        return self.saved_s > self.spread_s and self.share >= WORTH


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a step.

    Attributes:
        bound: One of the five.
        why: A sentence.
        shares: What the step is spent on, each as a part of it; they add up to 1.
    """

    bound: Bound
    why: str
    shares: Mapping[Cause, float]


def verdict_on_step(parts: Sequence[StepPart], profile: ProfileResult) -> Verdict:
    """The verdict on a step.

    Args:
        parts: All of its parts.
        profile: Of the same loop under the same plan.
    """
    shares = {cause: sum(p.share for p in parts if p.cause == cause) for cause in CAUSES}
    busy = profile.limiting
    if len(busy) > 1:
        why = f"Threads {listed(busy)} are busy all the time: to save time, all have to do less."
        return Verdict("balanced", why, shares)
    most = max(CAUSES, key=lambda cause: shares[cause])
    if shares[most] < MOST:
        shown = sorted(CAUSES, key=lambda cause: -shares[cause])
        spent = ", ".join(f"{cause} {shares[cause]:.0%}" for cause in shown if shares[cause])
        return Verdict("balanced", f"No one thing takes half of the step: {spent}.", shares)
    longest = sorted((p for p in parts if p.cause == most), key=lambda part: -part.seconds)
    named = listed([part.task for part in longest if part.share >= WORTH], _NAMED)
    bound: Bound = f"{most}-bound"  # type: ignore[assignment]
    return Verdict(bound, f"For {shares[most]:.0%} of its time it {_WORDS[most]}: {named}.", shares)


def costs_of(profile: ProfileResult) -> CostModel:
    """What the tasks cost, by a profile."""
    return CostModel(
        {
            name: TaskCost(1e6 * host_s, device_us=1e6 * profile.device_s.get(name, 0.0))
            for name, host_s in profile.host_s.items()
        }
    )


def ceiling_of(
    plan: PipelinePlan, roles: Roles, profile: ProfileResult, *, streams: bool, cpu_s: float = 0.0
) -> Ceiling:
    """The ceiling of a loop.

    Args:
        plan: Carries the dependences between its tasks; its stages and threads do not matter.
        roles: Of its tasks.
        profile: What was measured.
        streams: Whether the device has streams.
        cpu_s: What an iteration takes of the cores at least, on all threads of the process.
    """
    costs = costs_of(profile)
    bounds = lower_bounds(plan, costs, streams=streams, threads=len(costs.tasks) + 1)
    floor_s = bounds.ii_us / 1e6
    what, _, names = bounds.busiest.partition(": ")
    limiting = names.removesuffix(" alone").split(", ")
    limit = f"{what}: {listed(names.split(', '), _NAMED)}"
    if bounds.rec_mii_us > bounds.res_mii_us:
        limiting = [*roles.recurring]
        limit = (
            f"{listed(roles.recurring, 2 * _NAMED)}, which wait for each other across iterations"
        )
    others = sorted(profile.host_s.keys() - limiting, key=lambda name: -profile.host_s[name])
    own_cores = max(1, cores() // ranks_on_machine())
    on_threads_s = sum(s - profile.blocked_s.get(name, 0.0) for name, s in profile.host_s.items())
    on_cpu_s = max(cpu_s, on_threads_s) / own_cores
    if on_cpu_s > floor_s:
        floor_s, limit, others = on_cpu_s, f"{counted(own_cores, 'core')} for all tasks", []
    step_s = profile.baseline_s
    floor_s = min(floor_s, step_s)
    saved_s = step_s - floor_s
    return Ceiling(floor_s, limit, (*others,), saved_s, profile.baseline_spread_s, saved_s / step_s)
