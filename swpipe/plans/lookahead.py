"""Lookahead assignment: how many iterations ahead of training each task of the preparation runs.

A task with lookahead k works k iterations ahead of the last stage: its stage is L - k, where L is
the largest lookahead. What rules an assignment:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swpipe.costs import CostModel
from swpipe.dependence import CycleError, dependences, period_order, serial_order
from swpipe.errors import PlanError, Problem
from swpipe.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.plans.bounds import lower_bounds
from swpipe.plans.limits import Limits
from swpipe.plans.queues import (
    callers_own,
    communicator_queues,
    fire_order,
    interval_us,
    require,
    tickets,
)

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


class Bound(NamedTuple):
    """The producer's lookahead is at least the consumer's less the distance."""

    consumer: str
    producer: str
    distance: int


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
    require(plan, costs, limits)
    if problems := [*too_deep(plan, limits), *_too_many_threads(plan, limits)]:
        raise PlanError(problems)
    rules = Rules.of(plan, costs, limits)
    given = within(plan, limits)
    given_us = interval_us(given, costs, streams=streams)
    orders = dict.fromkeys(tuple(period_order(p)) for p in (plan, replace(plan, order=())))
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


def lookaheads(plan: PipelinePlan) -> dict[str, int]:
    """Task to how many periods ahead of the last stage it runs."""
    return {name: plan.max_stage - entry.stage for name, entry in plan.schedule.items()}


def within(plan: PipelinePlan, limits: Limits) -> PipelinePlan:
    """The plan with no more iterations in flight than the limits allow; its stages fit already."""
    if plan.depth <= limits.in_flight:
        return plan
    return replace(plan, pipeline_depth=limits.in_flight)


# ------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every assignment of one plan.

    Attributes:
        floor: Task to its least lookahead.
        cap: Task to its greatest.
        stays: Tasks whose lookahead is not up to the planner.
        bounds: What ties lookaheads to each other.
        queues: The communicators' queues.
        in_flight: Iterations in flight at most.
    """

    floor: Mapping[str, int]
    cap: Mapping[str, int]
    stays: frozenset[str]
    bounds: tuple[Bound, ...]
    queues: tuple[tuple[str, ...], ...]
    in_flight: int

    @classmethod
    def of(cls, plan: PipelinePlan, costs: CostModel, limits: Limits) -> Rules:
        """The rules of a plan that keeps to the limits."""
        floor = lookaheads(plan)
        queues = communicator_queues(plan, costs)
        bounds = [Bound(*dep[:3]) for dep in dependences(plan)]
        stays = {*limits.frozen, *callers_own(plan)}
        for later, sooner in tickets(queues):
            if floor[later] <= floor[sooner]:
                bounds.append(Bound(later, sooner, 0))
            else:
                stays.add(later)  # it has overtaken the sooner one already: no further
        cap = {name: floor[name] if name in stays else limits.in_flight - 1 for name in floor}
        changed = True
        while changed:  # a producer that stays holds its consumers back, and they theirs
            changed = False
            for consumer, producer, distance in bounds:
                if cap[consumer] > cap[producer] + distance:
                    cap[consumer] = cap[producer] + distance
                    changed = True
        return cls(floor, cap, frozenset(stays), tuple(bounds), queues, limits.in_flight)

    def reach(self, target: Mapping[str, int]) -> dict[str, int]:
        """The least lookaheads that meet the targets as far as the caps let them."""
        level = {n: max(f, min(self.cap[n], target.get(n, 0))) for n, f in self.floor.items()}
        changed = True
        while changed:  # a consumer that is raised pulls its producers along
            changed = False
            for consumer, producer, distance in self.bounds:
                if level[producer] < level[consumer] - distance:
                    level[producer] = level[consumer] - distance
                    changed = True
        return level


def too_deep(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    """What in a plan is further ahead than the limits admit, where lookaheads only rise."""
    ahead = lookaheads(plan)
    if (least := plan.max_stage + 1) > limits.in_flight:
        yield Problem(
            f"the limit of {limits.in_flight} iterations in flight binds: the plan as it stands "
            f"has {least} stages, and lookaheads only rise: allow {least} or more, or begin with "
            "fewer stages",
            tuple(name for name, entry in plan.schedule.items() if not entry.stage),
        )
    for name in limits.frozen:
        if ahead[name]:
            yield Problem(
                f"task {name!r} is frozen, but runs {ahead[name]} ahead of the last stage as the "
                f"plan stands, and lookaheads only rise: put it into stage {plan.max_stage}, or "
                "leave it out of frozen",
                (name,),
            )


def _too_many_threads(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    groups = dict.fromkeys([DEFAULT_GROUP, *(e.thread_group for e in plan.schedule.values())])
    if len(groups) > limits.threads:
        yield Problem(
            f"the limit of {limits.threads} thread groups binds: the plan has {len(groups)} "
            f"({', '.join(groups)}), and lookaheads change none: allow {len(groups)} or more, or "
            "put tasks together"
        )
    for name in limits.frozen:
        if (group := plan.schedule[name].thread_group) != DEFAULT_GROUP:
            yield Problem(
                f"task {name!r} is frozen, but in the thread group {group!r}: frozen tasks are on "
                f"the caller's thread: put it into {DEFAULT_GROUP!r}, or leave it out of frozen",
                (name,),
            )


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
    for levels in _assignments(plan, costs, rules):
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


def _assignments(plan: PipelinePlan, costs: CostModel, rules: Rules) -> Iterable[Mapping[str, int]]:
    """What is worth a simulation: none twice, and the fewest iterations in flight first."""
    ways = _ways(plan, costs, rules)
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


def _ways(plan: PipelinePlan, costs: CostModel, rules: Rules) -> dict[str, _Way]:
    """The way of each task that may be raised and that something which stays needs."""
    consumers: dict[str, list[str]] = {name: [] for name in plan.schedule}
    for consumer, producer, distance in rules.bounds:
        if not distance and consumer != producer:
            consumers[producer].append(consumer)
    ways: dict[str, _Way] = {}
    for name in reversed(serial_order(plan, list(plan.schedule))):
        if name in rules.stays:
            continue
        on = [_Way(0.0, rules.floor[c]) for c in consumers[name] if c in rules.stays]
        on += [ways[c] for c in consumers[name] if c in ways]
        if on:
            time_us = costs.tasks[name].total_us + max(way.time_us for way in on)
            ways[name] = _Way(time_us, max(way.base for way in on))
    return ways
