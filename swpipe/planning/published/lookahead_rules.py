"""Rules for lookaheads: floors, caps, and what ties one task's lookahead to another's.

A task with lookahead k works k iterations ahead of the last stage. ``lookahead`` says
what the rules are; here they are worked out for one plan, once, whatever is tried after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.errors import Problem
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.resolved import ResolvedPlan
from swpipe.planning.limits import Limits
from swpipe.planning.published.queue_rules import callers_own, communicator_queues, tickets


def lookaheads(plan: PipelinePlan) -> dict[str, int]:
    """Task to how many periods ahead of the last stage it runs."""
    return {name: plan.max_stage - entry.stage for name, entry in plan.schedule.items()}


def within(plan: PipelinePlan, limits: Limits) -> PipelinePlan:
    """The plan with no more iterations in flight than the limits allow; its stages fit already."""
    if plan.depth <= limits.in_flight:
        return plan
    return replace(plan, pipeline_depth=limits.in_flight)


class Bound(NamedTuple):
    """The producer's lookahead is at least the consumer's less the distance."""

    consumer: str
    producer: str
    distance: int


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
        serial: The tasks in serial order.
    """

    floor: Mapping[str, int]
    cap: Mapping[str, int]
    stays: frozenset[str]
    bounds: tuple[Bound, ...]
    queues: tuple[tuple[str, ...], ...]
    in_flight: int
    serial: tuple[str, ...]

    @classmethod
    def of(cls, resolved: ResolvedPlan, costs: CostModel, limits: Limits) -> Rules:
        """The rules of a plan that keeps to the limits."""
        plan = resolved.plan
        floor = lookaheads(plan)
        queues = communicator_queues(resolved, costs)
        bounds = [Bound(*dep[:3]) for dep in resolved.dependences]
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
        most, serial = limits.in_flight, resolved.serial_order
        return cls(floor, cap, frozenset(stays), tuple(bounds), queues, most, serial)

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


def too_many_threads(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    """What the limits say of a plan's thread groups, where these stay as they are."""
    groups = plan.thread_groups
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
