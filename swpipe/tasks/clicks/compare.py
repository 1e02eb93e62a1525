"""Runs of the same job under different plans: equal by bits? And how fast, fairly measured?"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.tasks.clicks.train import TrainRun


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run differs from another of the same config under another plan.

    Attributes:
        first_loss: The first step whose losses differ in any bit, from 0; None where none does.
        parameters: Names of parameters that differ in any bit.
    """

    first_loss: int | None
    parameters: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """All losses and all parameters are equal, bit for bit."""
        return self.first_loss is None and not self.parameters


def compare(a: TrainRun, b: TrainRun) -> Comparison:
    """Compare losses and parameters by bits, on all ranks.

    Raises:
        ValueError: The runs are not of the same length.
    """
    if len(a.losses) != len(b.losses):
        raise ValueError(
            f"{a.name} ran {len(a.losses)} steps and {b.name} {len(b.losses)}: run both alike first"
        )
    apart = (
        step
        for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True))
        if not torch.equal(x, y)
    )
    theirs = dict(b.job.model.named_parameters())
    parameters = tuple(
        name for name, mine in a.job.model.named_parameters() if not torch.equal(mine, theirs[name])
    )
    return _together(a.job.over_ranks(Comparison(next(apart, None), parameters)))


def _together(found: Sequence[Comparison]) -> Comparison:
    """What differs on any rank."""
    first = min((one.first_loss for one in found if one.first_loss is not None), default=None)
    return Comparison(first, tuple(sorted({name for one in found for name in one.parameters})))


def alternate(
    runs: Sequence[TrainRun],
    steps: int,
    *,
    chunk: int = 50,
    warm_up: int = 10,
    on_step: Callable[[], object] | None = None,
) -> None:
    """Advance several runs by ``steps`` each, in turns.

    Turns are short and change their order, so that a machine that slows down, or that others use as
    well, does so for all of them alike. Each turn fills its pipeline and drains it; that counts.

    Args:
        runs: Their plans may differ.
        steps: How many for each.
        chunk: Steps in a turn.
        warm_up: Steps of the first turn, which is not timed.
        on_step: Called after each step of each run.
    """
    for run in runs:
        run.advance(min(warm_up, steps), on_step, timed=False)
    for turn, done in enumerate(range(warm_up, steps, chunk)):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.advance(min(chunk, steps - done), on_step)


@dataclass(frozen=True, slots=True)
class Speed:
    """How a plan does against another one, and how it could do at best.

    Attributes:
        ratio: Steps per second over the other's.
        allowed: What the other's task times allow: its busiest thread group's over the busiest of
            this plan; NaN on several ranks, where tasks wait for other ranks and these times say
            little.
    """

    ratio: float
    allowed: float

    @property
    def reached(self) -> float:
        """The part of what is allowed that was reached."""
        return self.ratio / self.allowed


def speed(first: TrainRun, run: TrainRun) -> Speed:
    """How much faster ``run`` is: medians over the turns that the two took side by side.

    Task times are host times, so what they allow means something on a CPU only.
    """
    ratios, allowed = [], []
    for ours, theirs in zip(run.timed, first.timed, strict=True):
        ratios.append(theirs.step_s / ours.step_s)
        allowed.append(_busiest_s(first.plan, theirs.task_s) / _busiest_s(run.plan, theirs.task_s))
    if not ratios:
        return Speed(math.nan, math.nan)
    alone = run.job.size == 1
    return Speed(statistics.median(ratios), statistics.median(allowed) if alone else math.nan)


def _busiest_s(plan: PipelinePlan, task_s: Mapping[str, float]) -> float:
    """What the tasks of one thread group take, of that which takes longest."""
    group_s: dict[str, float] = defaultdict(float)
    for name, entry in plan.schedule.items():
        group_s[entry.thread_group] += task_s[name]
    return max(group_s.values())
