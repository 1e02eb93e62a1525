"""Lookahead assignment: how many iterations ahead of training each preparing task runs.

A task with lookahead k works k iterations ahead of the last stage L: its stage is L - k. Rules:

- **Lookaheads are only raised**, never lowered below those of the given plan.
- **Fixed tasks keep their lookahead**: the caller's tasks, which have no stream and run on the
  caller's thread, and frozen tasks, at lookahead 0.
- **Dependences hold.** For a dependence of distance d, the producer's lookahead is at least the
  consumer's minus d. So raising a task raises its producers, and a fixed producer limits its
  consumers. A dependence within a period counts with the distance that it has in the given plan: a
  raise may make it smaller, which is stricter, but not greater.
- **Communicators keep their order.** Of two tasks of one communicator the later one is never raised
  above the earlier one, so an iteration's collectives keep their order.
- **Depth** stays within the limit: at most so many iterations are in flight.

For each task, the time of the longest path from its start to the first fixed task that needs it is
computed. Spread over n periods, the task runs ceil(n * its time / the longest time) periods ahead.
Each n up to the limit gives an assignment. The best one in simulation is chosen, the given plan
included; among equals, the one with the fewest iterations in flight.

Source: the lookahead scheduler of the schedulable engine in NVIDIA's recsys-examples, which its
joint search calls for each candidate. The rules are the published ones; how far tasks are raised is
not published, and is swpipe's own choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.dependence import CycleError
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning.limits import Limits
from swpipe.planning.published.lookahead_rules import (
    Rules,
    limit_depth,
    lookaheads,
    too_deep,
    too_many_threads,
)
from swpipe.planning.published.queue_rules import check_inputs, closest_order
from swpipe.planning.simulation.bounds import lower_bounds
from swpipe.planning.simulation.interval import interval_us

SAME = 1e-9
"""Relative difference below which two intervals count as equal."""


@dataclass(frozen=True, slots=True)
class Lookaheads:
    """The result of lookahead assignment.

    Attributes:
        plan: The given plan with new stages, depth and order.
        ii_us: Its simulated interval; microseconds.
        lookahead: Task to the number of periods that it runs ahead of the last stage.
        tried: How many assignments were simulated.
        why: What was chosen, in words.
    """

    plan: PipelinePlan
    ii_us: float
    lookahead: Mapping[str, int]
    tried: int
    why: str


class Scored(NamedTuple):
    """A plan, its simulated interval in microseconds, and how many plans were simulated."""

    plan: PipelinePlan
    ii_us: float
    tried: int


def assign_lookaheads(
    plan: PipelinePlan, costs: CostModel, *, limits: Limits | None = None, streams: bool = True
) -> Lookaheads:
    """Raise lookaheads as far as that shortens the interval.

    Args:
        plan: As for ``joint_search``; streams and thread groups do not change.
        costs: A cost for each of its tasks.
        limits: The planner's limits; by default ``Limits()``.
        streams: Plan for a device with streams; on a CPU all cost is host time.

    Raises:
        PlanError: As for ``joint_search``.
    """
    limits = limits or Limits()
    resolved = check_inputs(plan, costs, limits)
    if problems := [*too_deep(plan, limits), *too_many_threads(plan, limits)]:
        raise PlanError(problems)
    rules = Rules.of(resolved, costs, limits)
    given = limit_depth(plan, limits)
    given_us = interval_us(given, costs, streams=streams)
    free = resolve_plan(replace(plan, order=()))
    orders = dict.fromkeys([resolved.period_order, free.period_order])
    best, tried = Scored(given, given_us, 1), 1
    for order in orders:
        found = best_assignment(given, costs, rules, order, streams=streams)
        if found is not None:
            tried += found.tried
            best = found if found.ii_us < best.ii_us * (1 - SAME) else best
    assigned, start = lookaheads(best.plan), lookaheads(plan)
    raised = [f"{n} {start[n]} to {k}" for n, k in assigned.items() if k > start[n]]
    why = f"{given_us:.0f} us become {best.ii_us:.0f} us; raised: {', '.join(raised) or 'none'}"
    return Lookaheads(best.plan, best.ii_us, assigned, tried, why)


def best_assignment(
    plan: PipelinePlan,
    costs: CostModel,
    rules: Rules,
    priority: Sequence[str],
    *,
    streams: bool,
) -> Scored | None:
    """The best plan over all assignments, with an order of the period closest to ``priority``.

    None if no assignment has an order: communicator order contradicts the plan's edges of lag 0.
    Assignments with fewer iterations in flight are tried first, until the lower bound is reached.
    """
    least_us = lower_bounds(plan, costs, streams=streams).ii_us
    best: Scored | None = None
    tried = 0
    for levels in _assignments(costs, rules):
        try:
            raised = _with(plan, levels, priority, rules)
        except CycleError:
            continue
        ii_us = interval_us(raised, costs, streams=streams)
        tried += 1
        if best is None or ii_us < best.ii_us * (1 - SAME):
            best = Scored(raised, ii_us, tried)
        if best.ii_us <= least_us * (1 + SAME):
            break
    return best and best._replace(tried=tried)


def _with(
    plan: PipelinePlan, levels: Mapping[str, int], priority: Sequence[str], rules: Rules
) -> PipelinePlan:
    most = max(plan.max_stage, *levels.values())
    depth = plan.pipeline_depth
    raised = replace(
        plan,
        schedule={n: replace(e, stage=most - levels[n]) for n, e in plan.schedule.items()},
        order=(),
        pipeline_depth=None,
    )
    if depth is not None:
        raised = replace(raised, pipeline_depth=max(depth, raised.least_depth))
    return replace(raised, order=closest_order(raised, priority, rules.queues))


def _assignments(costs: CostModel, rules: Rules) -> Iterable[Mapping[str, int]]:
    """The assignments to simulate, each once, the fewest iterations in flight first."""
    paths = _paths(costs, rules)
    longest = max((path.time_us for path in paths.values()), default=0.0)
    targets: list[dict[str, int]] = [{}]
    targets += [
        {n: path.base + _periods(periods, path.time_us, longest) for n, path in paths.items()}
        for periods in range(1, rules.in_flight)
    ]
    found = [rules.raise_to(target) for target in targets]
    unique = {tuple(levels.values()): levels for levels in found if min(levels.values()) == 0}
    return sorted(unique.values(), key=lambda levels: (max(levels.values()), sum(levels.values())))


def _periods(periods: int, time_us: float, longest: float) -> int:
    """How many periods ahead, from 1, a task with this remaining path runs."""
    return max(1, math.ceil(periods * time_us / longest * (1 - SAME))) if longest else 1


class _Path(NamedTuple):
    """The paths from the start of a task to the first fixed tasks that need it.

    Attributes:
        time_us: The longest one, in microseconds.
        base: The greatest lookahead among these fixed tasks.
    """

    time_us: float
    base: int


def _paths(costs: CostModel, rules: Rules) -> dict[str, _Path]:
    """The paths of each task that may be raised and that a fixed task needs."""
    consumers: dict[str, list[str]] = {name: [] for name in rules.serial}
    for consumer, producer, distance in rules.bounds:
        if not distance and consumer != producer:
            consumers[producer].append(consumer)
    paths: dict[str, _Path] = {}
    for name in reversed(rules.serial):
        if name in rules.fixed:
            continue
        on = [_Path(0.0, rules.floor[c]) for c in consumers[name] if c in rules.fixed]
        on += [paths[c] for c in consumers[name] if c in paths]
        if on:
            time_us = costs.tasks[name].total_us + max(path.time_us for path in on)
            paths[name] = _Path(time_us, max(path.base for path in on))
    return paths
