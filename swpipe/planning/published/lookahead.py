"""Lookahead assignment: how many iterations ahead of training each task of the preparation runs.

A task with lookahead k works k iterations ahead of the last stage: its stage is L - k, L the last
stage. What rules an assignment:

- **It only raises.** A lookahead that the plan has is a floor.
- **The caller's own tasks stay**, those without a stream on the caller's thread, and so do frozen
  tasks, at lookahead 0.
- **No future is read.** Where a consumer comes after a producer d iterations before, the producer's
  lookahead is at least the consumer's less d. So a raise pulls producers along, and a producer
  that stays holds its consumers back. A dependence within a period counts with the distance that it
  has as the plan stands: a raise may make that smaller, which asks for more, but not greater.
- **Communicators keep their queues.** Of two tasks of one queue the later is never raised above
  the sooner, so an iteration's collectives keep their order. Tickets stay as they are.
- **In flight** are no more iterations than the limits allow: L + 1.

How far is a matter of time. The preparation's critical path, from the beginning of a task to
the first task that stays and needs it, takes some time; spread over n periods, a task on it
belongs ceil(n * its time to go / the longest) periods ahead. Each n up to the cap gives an
assignment. The simulator says which is best, the plan as it stands among them; of equals the one
that holds the fewest iterations.

Source: the lookahead scheduler of the schedulable engine in NVIDIA's recsys-examples, which its
joint search asks for the lookaheads of each candidate. The rules above are its rules; how far it
raises is not published, and is ours here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.dependence import CycleError
from swpipe.core.errors import PlanError
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.limits import Limits
from swpipe.planning.published.lookahead_rules import (
    Rules,
    lookaheads,
    too_deep,
    too_many_threads,
    within,
)
from swpipe.planning.published.queue_rules import fire_order, interval_us, require
from swpipe.planning.simulation.bounds import lower_bounds

SAME = 1e-9
"""Two intervals that differ by less than this part of themselves count as equal."""


@dataclass(frozen=True, slots=True)
class Lookaheads:
    """What the assignment gave.

    Attributes:
        plan: The plan given, with the stages and the depth that this takes, and an order.
        ii_us: Its interval between iterations under the simulator; microseconds.
        lookahead: Task to the periods that it runs ahead of the last stage; from 0.
        tried: How many assignments were simulated.
        why: What was chosen, in words.
    """

    plan: PipelinePlan
    ii_us: float
    lookahead: Mapping[str, int]
    tried: int
    why: str


class Scored(NamedTuple):
    """A plan, its interval under the simulator (microseconds), and how many were simulated."""

    plan: PipelinePlan
    ii_us: float
    tried: int


def assign_lookaheads(
    plan: PipelinePlan, costs: CostModel, *, limits: Limits | None = None, streams: bool = True
) -> Lookaheads:
    """Raise lookaheads as far as it pays.

    Args:
        plan: Serial or pipelined; it needs no functions. Tasks that may run ahead name a stream, or
            a thread group other than the caller's. Both stay as they are.
        costs: What each of its tasks costs.
        limits: What to keep to; the default limits where left out.
        streams: Plan for a device with streams; on a CPU all cost is host time.

    Raises:
        PlanError: The plan cannot run, a task has no cost, a frozen task is unknown; or the limits
            admit no plan that only raises: the message says which limit, and the least that would.
    """
    limits = limits or Limits()
    resolved = require(plan, costs, limits)
    if problems := [*too_deep(plan, limits), *too_many_threads(plan, limits)]:
        raise PlanError(problems)
    rules = Rules.of(resolved, costs, limits)
    given = within(plan, limits)
    given_us = interval_us(given, costs, streams=streams)
    free = resolve_plan(replace(plan, order=()))
    orders = dict.fromkeys([resolved.period_order, free.period_order])
    best = Scored(given, given_us, 1)
    for order in orders:
        found = best_assignment(given, costs, rules, order, streams=streams)
        if found is not None:
            best = _better(best, found)
    assigned, start = lookaheads(best.plan), lookaheads(plan)
    raised = [f"{n} {start[n]} to {k}" for n, k in assigned.items() if k > start[n]]
    why = f"{given_us:.0f} us become {best.ii_us:.0f} us; raised: {', '.join(raised) or 'none'}"
    return Lookaheads(best.plan, best.ii_us, assigned, best.tried, why)


def _better(one: Scored, other: Scored) -> Scored:
    """The shorter interval, or the first; with what both tried."""
    tried = one.tried + other.tried
    best = other if other.ii_us < one.ii_us * (1 - SAME) else one
    return best._replace(tried=tried)


# ------------------------------------------------------------------------------------- assignments


def best_assignment(
    plan: PipelinePlan,
    costs: CostModel,
    rules: Rules,
    priority: Sequence[str],
    *,
    streams: bool,
) -> Scored | None:
    """The best plan that some assignment gives, with the period's order nearest to ``priority``.

    None where no assignment has an order: the queues contradict the plan's edges of lag 0. Fewer
    iterations in flight come first, and where the lower bound is reached nothing more is tried.
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
        pipeline_depth=None if depth is None else max(depth, most + 1),
    )
    return replace(raised, order=fire_order(raised, priority, rules.queues))


def _assignments(costs: CostModel, rules: Rules) -> Iterable[Mapping[str, int]]:
    """What is worth a simulation: none twice, and the fewest iterations in flight first."""
    ways = _ways(costs, rules)
    longest = max((way.time_us for way in ways.values()), default=0.0)
    targets: list[dict[str, int]] = [{}]
    targets += [
        {n: way.base + _periods(periods, way.time_us, longest) for n, way in ways.items()}
        for periods in range(1, rules.in_flight)
    ]
    found = [rules.reach(target) for target in targets]
    unique = {tuple(levels.values()): levels for levels in found if min(levels.values()) == 0}
    return sorted(unique.values(), key=lambda levels: (max(levels.values()), sum(levels.values())))


def _periods(periods: int, time_us: float, longest: float) -> int:
    """The period, from 1, in which a task this far from its end begins."""
    return max(1, math.ceil(periods * time_us / longest * (1 - SAME))) if longest else 1


class _Way(NamedTuple):
    """From the beginning of a task to the first tasks that stay and need it.

    Attributes:
        time_us: The longest way, in microseconds.
        base: The greatest lookahead among those that stay.
    """

    time_us: float
    base: int


def _ways(costs: CostModel, rules: Rules) -> dict[str, _Way]:
    """The way of each task that may be raised and that something which stays needs."""
    consumers: dict[str, list[str]] = {name: [] for name in rules.serial}
    for consumer, producer, distance in rules.bounds:
        if not distance and consumer != producer:
            consumers[producer].append(consumer)
    ways: dict[str, _Way] = {}
    for name in reversed(rules.serial):
        if name in rules.stays:
            continue
        on = [_Way(0.0, rules.floor[c]) for c in consumers[name] if c in rules.stays]
        on += [ways[c] for c in consumers[name] if c in ways]
        if on:
            time_us = costs.tasks[name].total_us + max(way.time_us for way in on)
            ways[name] = _Way(time_us, max(way.base for way in on))
    return ways
