"""Orders of a period for the joint search to try: five priority policies, and swaps of neighbours.

A policy ranks the tasks: of those that can be next in a period, the one ranked first is. It removes
no edge, and communicators keep their order. Two measures along dependences of distance 0, in
microseconds: a task's *remaining path*, the longest from its start to the end of the iteration, and
its *slack*, how much later it can start without lengthening the iteration's longest path.

Source: the tie-break policies of the joint search in NVIDIA's recsys-examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import ResolvedPlan, dependences_of
from swpipe.planning.published.presets import IO, Roles
from swpipe.planning.published.queue_rules import queue_edges, remaining_us

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policies rank by.

    Attributes:
        roles: The roles of the tasks.
        cost: Task to its cost.
        remaining_us: Task to its remaining path; microseconds.
        slack_us: Task to its slack; microseconds.
        position: Globally ordered task to its position among these in a period, from 0.
        copies: Tasks that use a copy engine: a resource that is no communicator, or the role io.
    """

    roles: Roles
    cost: Mapping[str, TaskCost]
    remaining_us: Mapping[str, float]
    slack_us: Mapping[str, float]
    position: Mapping[str, int]
    copies: frozenset[str]

    @classmethod
    def of(cls, resolved: ResolvedPlan, costs: CostModel, roles: Roles) -> PolicyInputs:
        """The inputs of a plan."""
        within, serial = resolved.within_iteration, resolved.serial_order
        begin = dict.fromkeys(serial, 0.0)
        remaining = remaining_us(serial, costs, [dep[:2] for dep in within])
        for name in serial:
            before = [p for c, p, *_ in within if c == name]
            begin[name] = max((begin[p] + costs.tasks[p].total_us for p in before), default=0.0)
        longest = max(remaining.values())
        schedule = resolved.plan.schedule
        ordered = [n for n in resolved.period_order if schedule[n].globally_ordered]
        shared = {r for n in ordered for r in costs.tasks[n].resources}
        holding = {n for n in serial if {*costs.tasks[n].resources} - shared}
        return cls(
            roles,
            costs.tasks,
            remaining,
            {name: longest - remaining[name] - begin[name] for name in serial},
            {name: place for place, name in enumerate(ordered)},
            frozenset(holding | {n for n, role in roles.role.items() if role == IO}),
        )


POLICIES: Mapping[str, Callable[[PolicyInputs, str], Rank]] = {
    # The caller's tasks first.
    "critical chain first": lambda by, n: (n not in by.roles.caller, -by.remaining_us[n]),
    # The caller's tasks last, the others by their own time.
    "longest elsewhere first": lambda by, n: (
        (True, -by.remaining_us[n]) if n in by.roles.caller else (False, -by.cost[n].total_us)
    ),
    "collectives early": lambda by, n: (
        by.position.get(n, len(by.position)),
        -by.remaining_us[n],
    ),
    "copies early": lambda by, n: (n not in by.copies, -by.remaining_us[n]),
    "least slack first": lambda by, n: (by.slack_us[n], -by.remaining_us[n]),
}
"""Name to policy. Ties are broken by the longest remaining path."""


def ranked(policy: str, inputs: PolicyInputs, order: Sequence[str]) -> tuple[str, ...]:
    """All tasks as a policy ranks them; equal ones stay in ``order``."""
    return tuple(sorted(order, key=lambda name: POLICIES[policy](inputs, name)))


def swaps(
    plan: PipelinePlan, order: Sequence[str], queues: Sequence[Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """Orders of a period in which two neighbours of ``order`` are swapped.

    The plan's edges of lag 0 and the communicators' queues are kept.
    """
    tied = {dep[:2] for dep in dependences_of(plan) if dep.lag == 0} | {*queue_edges(queues)}
    for place, (sooner, later) in enumerate(pairwise(order)):
        if (later, sooner) not in tied:
            yield (*order[:place], later, sooner, *order[place + 2 :])
