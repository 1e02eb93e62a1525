"""The one model under every front end: dependences with a distance and a lag.

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
from enum import Enum
from itertools import pairwise
from typing import Literal, NamedTuple

from swpipe.core.messages import MOST_LISTED


class Dependence(NamedTuple):
    """The consumer on iteration i comes after the producer on iteration i - distance.

    Attributes:
        lag: Periods from the producer's run to the consumer's.
        source: The field of the plan that declares it, for messages.
        host_only: It orders the two functions, and no work on streams.
    """

    consumer: str
    producer: str
    distance: int
    lag: int
    source: str
    host_only: bool = False

    def __str__(self) -> str:
        distant = self.distance and self.source != "same_period_deps"
        back = f" of {self.distance} iterations before" if distant else ""
        alone = ", host_only" if self.host_only else ""
        return f"{self.consumer} after {self.producer}{back} ({self.source}{alone})"


class ProposedEdge(NamedTuple):
    """An edge that a message proposes; its ``str`` is the plan's field that declares it.

    Attributes:
        distance: None for an edge within a period.
    """

    consumer: str
    producer: str
    distance: int | None

    def __str__(self) -> str:
        pair = f'("{self.consumer}", "{self.producer}"'
        if self.distance is None:
            return f"same_period_deps=[{pair})]"
        if self.distance == 0:
            return f"deps=[{pair})]"
        return f"cross_iter_deps=[{pair}, {self.distance})]"


class ProposedStage(NamedTuple):
    """The stages to which a message proposes to move a task.

    Attributes:
        stage: The first of them.
        bound: On which side of it the others lie.
        now: The task's present stage, where the message names it.
    """

    stage: int
    bound: Literal["later", "earlier"]
    now: int | None = None

    def __str__(self) -> str:
        start = "" if self.now is None else f"{self.now} to "
        return f"stage {start}{self.stage} or {self.bound}"


class Cycle(Enum):
    """What forms a cycle."""

    EDGES = "the edges form a cycle"
    ITERATION = "the dependences within an iteration form a cycle"
    PERIOD = "the dependences within a period form a cycle"
    ORDER = "order contradicts the dependences"


class CycleError(Exception):
    """Tasks that would each have to come after the next.

    Attributes:
        cycle: Their names; the first stands again at the end.
        source: What asks for it.
        dependences: Those between two neighbours, where ``topological`` was given any.
    """

    def __init__(
        self,
        cycle: Sequence[str],
        source: Cycle = Cycle.EDGES,
        dependences: Iterable[Dependence] = (),
    ) -> None:
        self.cycle = tuple(cycle)
        self.source = source
        neighbours = set(pairwise(self.cycle))
        self.dependences = tuple(one for one in dependences if one[:2] in neighbours)
        super().__init__(cycle, source)

    def __str__(self) -> str:
        names = [repr(name) for name in self.cycle]
        if len(names) > MOST_LISTED:
            names[MOST_LISTED - 1 : -1] = [f"{len(names) - MOST_LISTED} more"]
        return " after ".join(names)


def topological(
    rank: Mapping[str, tuple[int, ...]],
    edges: Iterable[tuple[str, str]],
    source: Cycle = Cycle.EDGES,
    dependences: Iterable[Dependence] = (),
) -> list[str]:
    """Kahn's algorithm over (consumer, producer) edges; the least rank among the ready is next.

    Raises:
        CycleError: There is no such order; the error has this source, and those of these
            dependences that are in the cycle.
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
        raise CycleError(_cycle(producers, set(rank) - set(order)), source, dependences)
    return order


def _cycle(producers: Mapping[str, set[str]], left: set[str]) -> list[str]:
    """One cycle among the tasks left over: each of them waits for another that is left over."""
    name = min(left)
    path: dict[str, None] = {}
    while name not in path:
        path[name] = None
        name = min(producers[name] & left)
    names = [*path]
    return [*names[names.index(name) :], name]
