"""The rules of lookahead assignment, computed once for a plan; ``lookahead`` explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.resolved import ResolvedPlan
from swpipe.errors import Problem
from swpipe.planning.limits import Limits
from swpipe.planning.published.queue_rules import caller_tasks, communicator_queues, queue_edges


def lookaheads(plan: PipelinePlan) -> dict[str, int]:
    """Task to the number of periods that it runs ahead of the last stage."""
    return {name: plan.max_stage - entry.stage for name, entry in plan.schedule.items()}


def limit_depth(plan: PipelinePlan, limits: Limits) -> PipelinePlan:
    """The plan with its depth reduced to the limit; its stages must fit already."""
    if plan.depth <= limits.in_flight:
        return plan
    return replace(plan, pipeline_depth=limits.in_flight)


class Bound(NamedTuple):
    """The producer's lookahead is at least the consumer's minus the distance."""

    consumer: str
    producer: str
    distance: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Constraints on the lookaheads of one plan.

    ``floor`` and ``cap`` are each task's least and greatest lookahead, ``queues`` the tasks of each
    communicator, ``in_flight`` the most iterations in flight, and ``serial`` the serial order.
    """

    floor: Mapping[str, int]
    cap: Mapping[str, int]
    fixed: frozenset[str]
    bounds: tuple[Bound, ...]
    queues: tuple[tuple[str, ...], ...]
    in_flight: int
    serial: tuple[str, ...]

    @classmethod
    def of(cls, resolved: ResolvedPlan, costs: CostModel, limits: Limits) -> Rules:
        """The rules of a plan within the limits."""
        plan = resolved.plan
        floor = lookaheads(plan)
        queues = communicator_queues(resolved, costs)
        bounds = [Bound(*dep[:3]) for dep in resolved.dependences]
        fixed = {*limits.frozen, *caller_tasks(plan)}
        for later, sooner in queue_edges(queues):
            if floor[later] <= floor[sooner]:
                bounds.append(Bound(later, sooner, 0))
            else:
                fixed.add(later)  # it is already ahead of the earlier one: no further
        cap = {name: floor[name] if name in fixed else limits.in_flight - 1 for name in floor}
        changed = True
        while changed:  # a producer's cap limits its consumers, and theirs
            changed = False
            for consumer, producer, distance in bounds:
                if cap[consumer] > cap[producer] + distance:
                    cap[consumer] = cap[producer] + distance
                    changed = True
        most, serial = limits.in_flight, resolved.serial_order
        return cls(floor, cap, frozenset(fixed), tuple(bounds), queues, most, serial)

    def raise_to(self, target: Mapping[str, int]) -> dict[str, int]:
        """The least lookaheads that meet the targets as far as the caps allow."""
        level = {n: max(f, min(self.cap[n], target.get(n, 0))) for n, f in self.floor.items()}
        changed = True
        while changed:  # raising a consumer raises its producers
            changed = False
            for consumer, producer, distance in self.bounds:
                if level[producer] < level[consumer] - distance:
                    level[producer] = level[consumer] - distance
                    changed = True
        return level


def too_deep(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    """Where a plan exceeds the limits on depth, given that lookaheads are only raised."""
    ahead = lookaheads(plan)
    if (least := plan.max_stage + 1) > limits.in_flight:
        yield Problem(
            f"the plan has {least} stages, and lookaheads are only raised, but the limit is "
            f"{limits.in_flight} iterations in flight: allow {least} or more, or start from fewer "
            "stages",
            tuple(name for name, entry in plan.schedule.items() if not entry.stage),
        )
    for name in limits.frozen:
        if ahead[name]:
            yield Problem(
                f"task {name!r} is frozen, but runs {ahead[name]} ahead of the last stage, and "
                f"lookaheads are only raised: put it into stage {plan.max_stage}, or leave it out "
                "of frozen",
                (name,),
            )


def too_many_threads(plan: PipelinePlan, limits: Limits) -> Iterator[Problem]:
    """Where a plan exceeds the limits on thread groups, given that these do not change."""
    groups = plan.thread_groups
    if len(groups) > limits.threads:
        yield Problem(
            f"the plan has {len(groups)} thread groups ({', '.join(groups)}), but the limit is "
            f"{limits.threads}, and lookaheads change none: allow {len(groups)} or more, or use "
            "fewer groups"
        )
    for name in limits.frozen:
        if (group := plan.schedule[name].thread_group) != DEFAULT_GROUP:
            yield Problem(
                f"task {name!r} is frozen, but in the thread group {group!r}: put it into "
                f"{DEFAULT_GROUP!r}, the caller's thread, or leave it out of frozen",
                (name,),
            )
