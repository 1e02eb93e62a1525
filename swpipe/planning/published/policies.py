"""Orders of a period to try: five policies for ties, and swaps of neighbours.

A policy ranks the tasks. Of those that may be next in a period, the one that it ranks first is; it
removes no edge, and the tickets of a communicator stay in their order. Two measures recur, both
along dependences of distance 0, in microseconds: a task's *way on*, the longest path from its
beginning to the end of the iteration; and its *slack*, by how much it could begin later without
making the iteration's longest path longer.

Source: the tie-break policies of the joint search in NVIDIA's recsys-examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import ResolvedPlan, dependences_of
from swpipe.planning.published.presets import IO, Roles
from swpipe.planning.published.queue_rules import tickets

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the policies rank by.

    Attributes:
        roles: Who does what.
        cost: Task to its cost.
        way_us: Task to its way on; microseconds.
        slack_us: Task to its slack; microseconds.
        ticket: Globally ordered task to its place in the order of a period, from 0.
        copies: Tasks that hold a copy engine: a resource that is no communicator, or the role io.
    """

    roles: Roles
    cost: Mapping[str, TaskCost]
    way_us: Mapping[str, float]
    slack_us: Mapping[str, float]
    ticket: Mapping[str, int]
    copies: frozenset[str]

    @classmethod
    def of(cls, resolved: ResolvedPlan, costs: CostModel, roles: Roles) -> Outlook:
        """The outlook of a plan."""
        within, serial = resolved.within_iteration, resolved.serial_order
        begin = dict.fromkeys(serial, 0.0)
        way = {name: costs.tasks[name].total_us for name in serial}
        for name in serial:
            before = [p for c, p, *_ in within if c == name]
            begin[name] = max((begin[p] + costs.tasks[p].total_us for p in before), default=0.0)
        for name in reversed(serial):
            way[name] += max((way[c] for c, p, *_ in within if p == name), default=0.0)
        longest = max(way.values())
        schedule = resolved.plan.schedule
        ordered = [n for n in resolved.period_order if schedule[n].globally_ordered]
        shared = {r for n in ordered for r in costs.tasks[n].resources}
        holding = {n for n in serial if {*costs.tasks[n].resources} - shared}
        return cls(
            roles,
            costs.tasks,
            way,
            {name: longest - way[name] - begin[name] for name in serial},
            {name: place for place, name in enumerate(ordered)},
            frozenset(holding | {n for n, role in roles.role.items() if role == IO}),
        )


def _critical_chain(to: Outlook, name: str) -> Rank:
    """The caller's own tasks first, then the others; in each the longest way on."""
    return (name not in to.roles.own, -to.way_us[name])


def _longest_elsewhere(to: Outlook, name: str) -> Rank:
    """Tasks that are not the caller's first, the longest of them before the others."""
    own = name in to.roles.own
    return (own, -to.way_us[name] if own else -to.cost[name].total_us)


def _collectives(to: Outlook, name: str) -> Rank:
    """Globally ordered tasks first, in the order of their tickets."""
    return (to.ticket.get(name, len(to.ticket)), -to.way_us[name])


def _copies(to: Outlook, name: str) -> Rank:
    """Tasks that hold a copy engine first."""
    return (name not in to.copies, -to.way_us[name])


def _least_slack(to: Outlook, name: str) -> Rank:
    """The task that can least afford to wait first."""
    return (to.slack_us[name], -to.way_us[name])


POLICIES: Mapping[str, Callable[[Outlook, str], Rank]] = MappingProxyType(
    {
        "critical chain first": _critical_chain,
        "longest elsewhere first": _longest_elsewhere,
        "collectives early": _collectives,
        "copies early": _copies,
        "least slack first": _least_slack,
    }
)
"""Name to policy."""


def ranked(policy: str, outlook: Outlook, order: Sequence[str]) -> tuple[str, ...]:
    """All tasks as a policy ranks them; ties stay in ``order``."""
    return tuple(sorted(order, key=lambda name: POLICIES[policy](outlook, name)))


def swaps(
    plan: PipelinePlan, order: Sequence[str], queues: Sequence[Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """The orders in which two neighbours that nothing orders have changed places.

    Args:
        plan: Its edges of lag 0 order its tasks.
        order: The order of a period.
        queues: The communicators' queues; they order tasks too.
    """
    tied = {dep[:2] for dep in dependences_of(plan) if dep.lag == 0}
    tied |= {*tickets(queues)}
    for place, (sooner, later) in enumerate(pairwise(order)):
        if (later, sooner) not in tied:
            yield (*order[:place], later, sooner, *order[place + 2 :])
