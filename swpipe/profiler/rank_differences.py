"""Measured differences between the times of ranks: jitter, slow iterations, the slowest rank.

    tables of a rank        iteration  0    1    2    3          median
    read                              60   61  300   59     ->   60     slow in 1 of 4, 5 times
    train                            100  104   97  101     ->  100.5
    sum, slow ones as usual          160  165  157  160     ->  their spread is the jitter

Globally ordered tasks are left out, since their times include waiting for other ranks. Their cost
without waiting is estimated by the time on the rank where they take the least time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev

from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Ranks

_SLOW = 2.0
"""The multiple of its median time above which a task counts as slow in an iteration."""

_LEAST_SHARE = 0.01
"""The share of a rank's work below which slow iterations of a task count as jitter."""


@dataclass(frozen=True, slots=True)
class RankDifferences:
    """The differences between the times of ranks.

    Attributes:
        ranks: The measured ranks, with their jitter and slow iterations. For more ranks, use
            ``dataclasses.replace(ranks, number=...)``.
        costs: The mean costs of tasks, without slow iterations and without tables.
        slowest: The rank whose tasks take longest, without globally ordered tasks.
        task: The task whose time on the slowest rank exceeds the median rank's the most.
        longer_us: The excess of this task, in microseconds per iteration.
    """

    ranks: Ranks
    costs: CostModel
    slowest: int
    task: str
    longer_us: float


def rank_differences(models: Sequence[CostModel], meets: Collection[str]) -> RankDifferences:
    """Return the differences between ranks.

    Args:
        models: The costs that each rank has measured, with tables.
        meets: The globally ordered tasks.
    """
    names = [name for name in models[0].tasks if all(name in m.tasks for m in models)]
    local = [name for name in names if name not in meets]
    times = [{name: _times_us(model, name) for name in local} for model in models]
    usual = [{name: median(us) for name, us in of.items()} for of in times]
    # slow[task] = (share of slow iterations, mean factor over the median in these iterations).
    # Each time is divided by its own rank's median, so that a slow rank is not a slow iteration.
    slow: dict[str, tuple[float, float]] = {}
    for name in local:
        ratios = [
            us / usual[r][name]
            for r, of in enumerate(times)
            for us in of[name]
            if usual[r][name] > _LEAST_SHARE * sum(usual[r].values())
        ]
        longer = [ratio for ratio in ratios if ratio > _SLOW]
        if longer:
            slow[name] = (len(longer) / len(ratios), fmean(longer))
    spreads = [spread for r, of in enumerate(times) if (spread := _jitter(of, usual[r], slow))]
    # The excess is measured against the median rank, not the mean, which a slow rank would raise.
    mean_us = [{name: fmean(us) for name, us in of.items()} for of in times]
    slowest = max(range(len(models)), key=lambda r: sum(mean_us[r].values()))
    longer_us = {n: mean_us[slowest][n] - median(of[n] for of in mean_us) for n in local}
    task = max(longer_us, key=lambda name: longer_us[name], default="")
    return RankDifferences(
        ranks=Ranks(len(models), fmean(spreads) if spreads else 0.0, slow if meets else {}),
        costs=_costs(models, names, meets, slow),
        slowest=slowest,
        task=task,
        longer_us=longer_us.get(task, 0.0),
    )


def _times_us(model: CostModel, name: str) -> list[float]:
    """Return the times of a task over the sampled iterations, or its mean alone."""
    cost = model.tasks[name]
    return [each.total_us for each in cost.each(model.iterations)] or [cost.total_us]


def _jitter(
    times: Mapping[str, Sequence[float]], usual: Mapping[str, float], slow: Mapping[str, object]
) -> float:
    """Return the relative spread of a rank's work, with slow tasks counted by their median."""
    columns = [
        [usual[name] if name in slow and us > _SLOW * usual[name] else us for us in each]
        for name, each in times.items()
    ]
    # Jitter is the coefficient of variation of the work per iteration.
    sums = [sum(column) for column in zip(*columns, strict=True)]
    return pstdev(sums) / fmean(sums) if sums and fmean(sums) else 0.0


def _costs(
    models: Sequence[CostModel],
    names: Sequence[str],
    meets: Collection[str],
    slow: Mapping[str, tuple[float, float]],
) -> CostModel:
    tasks: dict[str, TaskCost] = {}
    for name in names:
        each = [model.tasks[name] for model in models]
        cost = min(each, key=lambda cost: cost.total_us) if name in meets else TaskCost.mean(each)
        # mean = usual * (1 + share * (factor - 1)): the division gives the cost without slow ones.
        share, factor = slow.get(name, (0.0, 1.0))
        cost = cost.scaled(1 / (1 + share * (factor - 1)))
        tasks[name] = replace(cost, host_each_us=(), device_each_us=())
    return replace(CostModel.mean(models), tasks=tasks)
