"""The one model under every front end: dependences with a distance, and their lags.

A dependence (consumer, producer, d) says: the consumer on iteration i comes after the producer on
iteration i - d. Task t works in period p on iteration p - s(t), so the two lie

    lag = s(consumer) - s(producer) + d

periods apart:

- lag < 0: the producer has not run yet; the plan is refused.
- lag = 0: both run in the same period; the edge orders the period.
- lag >= 1: the producer ran ``lag`` periods ago.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan


class Dependence(NamedTuple):
    """The consumer on iteration i comes after the producer on iteration i - distance."""

    consumer: str
    producer: str
    distance: int
    source: str
    """The field of the plan that says so, for messages."""

    def __str__(self) -> str:
        if self.source == "same_period_deps":
            return f"{self.consumer} after {self.producer} (same_period_deps)"
        back = f" of {self.distance} iterations before" if self.distance else ""
        return f"{self.consumer} after {self.producer}{back} ({self.source})"


class CycleError(Exception):
    """The dependences within a period form a cycle.

    Attributes:
        cycle: The names along it, each waiting for the next; the first stands again at the end.
    """

    def __init__(self, cycle: Sequence[str]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(" -> ".join(self.cycle))


def dependences(plan: PipelinePlan) -> tuple[Dependence, ...]:
    """All dependences that a plan declares, each with its distance; doubles are left out.

    Raises:
        KeyError: A name that the schedule does not have.
    """
    stage = {name: entry.stage for name, entry in plan.schedule.items()}
    found = [Dependence(c, p, 0, "deps") for c, p in plan.deps]
    found += [Dependence(c, p, d, "cross_iter_deps") for c, p, d in plan.cross_iter_deps]
    found += [
        Dependence(c, p, stage[p] - stage[c], "same_period_deps") for c, p in plan.same_period_deps
    ]
    unique: dict[tuple[str, str, int], Dependence] = {}
    for dep in found:
        unique.setdefault(dep[:3], dep)
    return tuple(unique.values())


def lag(plan: PipelinePlan, dep: Dependence) -> int:
    """How many periods lie between the producer's run and the consumer's."""
    return plan.schedule[dep.consumer].stage - plan.schedule[dep.producer].stage + dep.distance


def period_order(plan: PipelinePlan) -> list[str]:
    """One order of the tasks within a period, in which every edge of lag 0 points backwards.

    Ties: ``plan.order`` first; then tasks of worker groups before those of the default group, so
    that a collective of the next batch takes its turn before this batch's backward; then higher
    stages, so that the oldest iteration is not stuck behind a newer one; then declaration.

    Raises:
        CycleError: The edges of lag 0, or these and ``plan.order``, form a cycle.
    """
    return order_of(plan, dependences(plan))


def order_of(plan: PipelinePlan, declared: Iterable[Dependence]) -> list[str]:
    """``period_order`` for those who have the plan's dependences at hand."""
    stage = {name: entry.stage for name, entry in plan.schedule.items()}
    edges = [(c, p) for c, p, distance, _ in declared if stage[c] - stage[p] + distance == 0]
    if len(plan.order) == len(stage):  # it names all tasks, and may be followed as it is
        place = {name: k for k, name in enumerate(plan.order)}
        if place.keys() == stage.keys() and all(place[p] < place[c] for c, p in edges):
            return list(plan.order)
    edges += [(later, sooner) for sooner, later in pairwise(plan.order)]
    rank = {
        name: (entry.thread_group == DEFAULT_GROUP, -entry.stage, index)
        for index, (name, entry) in enumerate(plan.schedule.items())
    }
    return topological(rank, edges)


def serial_order(plan: PipelinePlan, declared: Sequence[str]) -> list[str]:
    """The order of a serial run: as declared, unless a dependence of distance 0 forbids it.

    Raises:
        CycleError: The dependences of distance 0 form a cycle.
    """
    edges = [(d.consumer, d.producer) for d in dependences(plan) if d.distance == 0]
    return topological({name: (i,) for i, name in enumerate(declared)}, edges)


def topological(rank: Mapping[str, tuple[int, ...]], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Kahn's algorithm over (consumer, producer) edges; the least rank among the ready is next.

    Raises:
        CycleError: There is no such order.
    """
    producers: dict[str, set[str]] = {name: set() for name in rank}
    consumers: dict[str, set[str]] = {name: set() for name in rank}
    for consumer, producer in edges:
        producers[consumer].add(producer)
        consumers[producer].add(consumer)
    missing = {name: len(of) for name, of in producers.items()}
    ready = [(rank[name], name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for consumer in consumers[name]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                heapq.heappush(ready, (rank[consumer], consumer))
    if len(order) < len(rank):
        raise CycleError(_cycle(producers, set(rank) - set(order)))
    return order


def _cycle(producers: Mapping[str, set[str]], left: set[str]) -> list[str]:
    """One cycle among the tasks left over: each of them waits for another that is left over."""
    path = [min(left)]
    while path[-1] not in path[:-1]:
        path.append(min(producers[path[-1]] & left))
    return path[path.index(path[-1]) :]
