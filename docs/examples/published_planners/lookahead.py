"""Lookahead assignment: the number of iterations that each preparing task runs ahead of training.

A task with lookahead k works k iterations ahead of the last stage L: its stage is L - k. The rules
are:

- **Lookaheads are only raised**, never lowered below those of the given plan.
- **Fixed tasks keep their lookahead.** These are the caller's tasks, which have no stream and run
  on the caller's thread, and the frozen tasks, whose lookahead is 0.
- **Dependences hold.** For a dependence of distance d, the producer's lookahead is at least the
  consumer's minus d. Therefore raising a task raises its producers, and a fixed producer limits its
  consumers. A dependence within a period counts with its distance in the given plan: a raise may
  make this distance smaller, which is stricter, but never greater.
- **Communicators keep their order.** Of two tasks of one communicator, the later task is never
  raised above the earlier task, so that an iteration's collectives keep their order.
- **The depth stays within the limit** on iterations in flight.

The time of a task's path is that of the longest path from its start to the first fixed task that
needs it. For each number of periods n up to the limit, one assignment lets each task run
ceil(n * its path's time / the longest path's time) periods ahead. The assignment with the shortest
simulated interval is chosen, where the given plan counts as an assignment. Among equals, the
assignment with the fewest iterations in flight is chosen.

Source: the lookahead scheduler of the schedulable engine in NVIDIA's recsys-examples, which its
joint search calls for each candidate. The rules are published. How far tasks are raised is not
published, and is swpipe's own choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from swpipe import PipelinePlan
from swpipe.core.dependence import CycleError
from swpipe.core.resolved import ResolvedPlan, resolve_plan
from swpipe.errors import PlanError, Problem
from swpipe.planning import Limits, lower_bounds
from swpipe.planning.simulation.interval import interval_us
from swpipe.profiler import CostModel

from .queue_rules import (
    DEFAULT_GROUP,
    Queues,
    caller_tasks,
    check_inputs,
    closest_order,
    communicator_queues,
)

_SAME = 1e-9
"""The relative difference below which two intervals count as equal."""


@dataclass(frozen=True, slots=True)
class Lookaheads:
    """The result of lookahead assignment.

    Attributes:
        plan: The given plan with new stages, depth and order.
        ii_us: The simulated interval of this plan, in microseconds.
        lookahead: The number of periods that each task runs ahead of the last stage, by name.
        why: A sentence about the chosen assignment.
    """

    plan: PipelinePlan
    ii_us: float
    lookahead: Mapping[str, int]
    why: str


class Scored(NamedTuple):
    """A plan and its simulated interval, in microseconds."""

    plan: PipelinePlan
    ii_us: float


def assign_lookaheads(
    plan: PipelinePlan, costs: CostModel, *, limits: Limits | None = None, streams: bool = True
) -> Lookaheads:
    """Raise the lookaheads of a plan's tasks as far as this shortens the interval.

    Args:
        plan: The plan to start from; see ``joint_search``. Its streams and thread groups stay.
        costs: The cost of each task, in microseconds.
        limits: The planner's limits; None for ``Limits()``.
        streams: Whether to plan for a device with streams. Otherwise all cost is host time.

    Raises:
        PlanError: The plan, the costs or the limits cannot be used; see ``joint_search``.
    """
    limits = limits or Limits()
    rules = Rules(check_inputs(plan, costs, limits), costs, limits)
    if problems := list(_threads_above(plan, limits)):
        raise PlanError(problems)
    given = rules.plan
    best = Scored(given, interval_us(given, costs, streams=streams))
    given_us = best.ii_us
    # Two orders to stay close to: the given one, and the engine's for a plan without an order.
    for order in dict.fromkeys([rules.order, resolve_plan(replace(plan, order=())).period_order]):
        better = best_assignment(given, costs, rules, order, streams=streams)
        if better is not None and better.ii_us < best.ii_us * (1 - _SAME):
            best = better
    assigned = lookaheads(best.plan)
    start = lookaheads(plan)
    raised = [f"{n} {start[n]} to {k}" for n, k in assigned.items() if k > start[n]]
    why = f"{given_us:.0f} us become {best.ii_us:.0f} us; raised: {', '.join(raised) or 'none'}"
    return Lookaheads(best.plan, best.ii_us, assigned, why)


def lookaheads(plan: PipelinePlan) -> dict[str, int]:
    """Return the number of periods that each task runs ahead of the last stage, by name."""
    return {name: plan.max_stage - entry.stage for name, entry in plan.schedule.items()}


def best_assignment(
    plan: PipelinePlan, costs: CostModel, rules: Rules, priority: Sequence[str], *, streams: bool
) -> Scored | None:
    """Return the best plan over all assignments, with an order close to ``priority``.

    Returns None if no assignment has an order, because the order of a communicator's tasks
    contradicts the plan's edges of lag 0.
    """
    # Assignments with fewer iterations in flight come first, and a later one must be better. The
    # loop ends early if the lower bound is reached.
    least_us = lower_bounds(plan, costs, streams=streams).ii_us
    best: Scored | None = None
    for levels in rules.assignments():
        try:
            raised = _with(plan, levels, priority, rules.queues)
        except CycleError:
            continue
        ii_us = interval_us(raised, costs, streams=streams)
        if best is None or ii_us < best.ii_us * (1 - _SAME):
            best = Scored(raised, ii_us)
        if best.ii_us <= least_us * (1 + _SAME):
            break
    return best


def _with(
    plan: PipelinePlan, levels: Mapping[str, int], priority: Sequence[str], queues: Queues
) -> PipelinePlan:
    most = max(plan.max_stage, *levels.values())
    # The depth is left out at first, since the plan's own may be too small for the new stages.
    depth = plan.pipeline_depth
    raised = replace(
        plan,
        schedule={n: replace(e, stage=most - levels[n]) for n, e in plan.schedule.items()},
        order=(),
        pipeline_depth=None,
    )
    if depth is not None:
        raised = replace(raised, pipeline_depth=max(depth, raised.least_depth))
    return replace(raised, order=closest_order(raised, priority, queues))


class _Path(NamedTuple):
    """The paths from the start of a task to the first fixed tasks that need it.

    Attributes:
        time_us: The time of the longest path, in microseconds.
        base: The greatest lookahead among these fixed tasks.
    """

    time_us: float
    base: int


class Rules:
    """The constraints on the lookaheads of one plan.

    Attributes:
        plan: The plan, with its depth reduced to the limit.
        order: The order of the plan's period.
        queues: The tasks of each communicator.

    Raises:
        PlanError: The plan's stages exceed the limits, and lookaheads are only raised.
    """

    def __init__(self, resolved: ResolvedPlan, costs: CostModel, limits: Limits) -> None:
        plan = resolved.plan
        if problems := list(_too_deep(plan, limits)):
            raise PlanError(problems)
        deep = plan.depth > limits.in_flight
        self.plan = replace(plan, pipeline_depth=limits.in_flight) if deep else plan
        self.order = resolved.period_order
        self.queues = communicator_queues(resolved, costs)
        self._costs = costs
        self._limits = limits
        self._serial = resolved.serial_order
        self._floor = floor = lookaheads(plan)
        self._fixed = {*limits.frozen, *caller_tasks(plan)}
        # (consumer, producer, d): the producer's lookahead is at least the consumer's minus d.
        self._bounds = [(dep.consumer, dep.producer, dep.distance) for dep in resolved.dependences]
        for sooner, later in (pair for queue in self.queues for pair in pairwise(queue)):
            if floor[later] <= floor[sooner]:
                self._bounds.append((later, sooner, 0))
            else:
                # The given plan has the later task ahead of the earlier one. That is kept, but
                # raising it further would break the rule.
                self._fixed.add(later)
        # Caps are the greatest and levels the least solution of the bounds; both are computed by
        # repetition until nothing changes. This ends, because caps only fall and levels only rise.
        self._cap = {n: k if n in self._fixed else limits.in_flight - 1 for n, k in floor.items()}
        changed = True
        while changed:  # a producer's cap limits its consumers, whose caps limit their consumers
            changed = False
            for consumer, producer, distance in self._bounds:
                if self._cap[consumer] > self._cap[producer] + distance:
                    self._cap[consumer] = self._cap[producer] + distance
                    changed = True

    def assignments(self) -> list[dict[str, int]]:
        """Return the distinct assignments to simulate, fewest iterations in flight first."""
        paths = self._paths()
        longest = max((path.time_us for path in paths.values()), default=0.0) or 1.0
        assignments = [self._raised({})]
        for periods in range(1, self._limits.in_flight):
            # A little less, so that a quotient that rounds up to just above an integer gives that
            # integer.
            share = periods * (1 - _SAME) / longest
            assignments.append(
                self._raised(
                    {n: p.base + max(1, math.ceil(p.time_us * share)) for n, p in paths.items()}
                )
            )
        # A task at lookahead 0 is the last stage. Without one, every task could run later.
        unique = {
            tuple(levels.values()): levels for levels in assignments if not min(levels.values())
        }
        return sorted(
            unique.values(), key=lambda levels: (max(levels.values()), sum(levels.values()))
        )

    def _raised(self, target: Mapping[str, int]) -> dict[str, int]:
        """Return the least lookaheads that meet the targets as far as the caps allow."""
        level = {n: max(f, min(self._cap[n], target.get(n, 0))) for n, f in self._floor.items()}
        changed = True
        while changed:  # raising a consumer raises its producers
            changed = False
            for consumer, producer, distance in self._bounds:
                if level[producer] < level[consumer] - distance:
                    level[producer] = level[consumer] - distance
                    changed = True
        return level

    def _paths(self) -> dict[str, _Path]:
        """Return the paths of all tasks that may be raised and that a fixed task needs."""
        # In reverse serial order, so that the paths of a task's consumers are known.
        paths: dict[str, _Path] = {}
        for name in reversed(self._serial):
            if name in self._fixed:
                continue
            needed_by = [c for c, p, d in self._bounds if p == name != c and not d]
            on = [_Path(0.0, self._floor[c]) for c in needed_by if c in self._fixed]
            on += [paths[c] for c in needed_by if c in paths]
            if on:
                time_us = self._costs.tasks[name].total_us + max(path.time_us for path in on)
                paths[name] = _Path(time_us, max(path.base for path in on))
        return paths


def _too_deep(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    if (least := plan.max_stage + 1) > limits.in_flight:
        yield Problem(
            f"the plan has {least} stages, and lookaheads are only raised, but the limit is "
            f"{limits.in_flight} iterations in flight: allow {least} or more, or start from fewer "
            "stages",
            tuple(name for name, entry in plan.schedule.items() if not entry.stage),
        )
    for name, ahead in lookaheads(plan).items():
        if ahead and name in limits.frozen:
            yield Problem(
                f"task {name!r} is frozen, but runs {ahead} ahead of the last stage, and "
                f"lookaheads are only raised: put it into stage {plan.max_stage}, or leave it out "
                "of frozen",
                (name,),
            )


def _threads_above(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    groups = plan.thread_groups
    if len(groups) > limits.groups:
        yield Problem(
            f"the plan has {len(groups)} thread groups ({', '.join(groups)}), but the limit is "
            f"{limits.groups}, and lookaheads change none: allow {len(groups)} or more, or use "
            "fewer groups"
        )
    for name in limits.frozen:
        if (group := plan.schedule[name].thread_group) != DEFAULT_GROUP:
            yield Problem(
                f"task {name!r} is frozen, but in the thread group {group!r}: put it into "
                f"{DEFAULT_GROUP!r}, the caller's thread, or leave it out of frozen",
                (name,),
            )
