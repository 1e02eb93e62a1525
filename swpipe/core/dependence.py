"""Dependences, each with a distance and a lag: the one model under every front end.

In a dependence (consumer, producer, d), the consumer on iteration i comes after the producer on
iteration i - d. Task t works in period p on iteration p - s(t), so the two are

    lag = s(consumer) - s(producer) + d

periods apart:

- lag < 0: the producer has not run yet; the plan is refused.
- lag = 0: both run in the same period; the edge orders the period.
- lag >= 1: the producer ran ``lag`` periods ago.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from swpipe.core.messages import MOST_LISTED


class Dependence(NamedTuple):
    """An edge: the consumer on iteration i comes after the producer on iteration i - distance.

    Attributes:
        consumer: The task that comes later.
        producer: The task that comes first.
        distance: The difference of their iterations.
        lag: Periods from the producer's run to the consumer's.
        source: The field of the plan that declares the edge, for messages.
        host_only: Whether it orders the two functions only, and no work on streams.
    """

    consumer: str
    producer: str
    distance: int
    lag: int
    source: str
    host_only: bool = False

    def __str__(self) -> str:
        # The distance of a same-period edge follows from the stages; nobody has declared it.
        distant = self.distance and self.source != "same_period_deps"
        back = f" of {self.distance} iterations before" if distant else ""
        alone = ", host_only" if self.host_only else ""
        return f"{self.consumer} after {self.producer}{back} ({self.source}{alone})"


class ProposedEdge(NamedTuple):
    """An edge that a message proposes; its ``str`` is the plan's field that declares it.

    Attributes:
        consumer: The task that comes later.
        producer: The task that comes first.
        distance: The difference of their iterations.
    """

    consumer: str
    producer: str
    distance: int

    def __str__(self) -> str:
        pair = f'("{self.consumer}", "{self.producer}"'
        if self.distance == 0:
            return f"deps=[{pair})]"
        return f"cross_iter_deps=[{pair}, {self.distance})]"


class ProposedStage(NamedTuple):
    """The stages to which a message proposes to move a task.

    Attributes:
        stage: The stage that is nearest to the present one.
        bound: Whether all later or all earlier stages are possible, too.
        now: The task's present stage, if the message names it.
    """

    stage: int
    bound: Literal["later", "earlier"]
    now: int | None = None

    def __str__(self) -> str:
        start = "" if self.now is None else f"{self.now} to "
        return f"stage {start}{self.stage} or {self.bound}"


class CycleError(Exception):
    """An error about tasks of which each would have to come after the next.

    Attributes:
        cycle: The names of the tasks; the first name is repeated at the end.
    """

    def __init__(self, cycle: Sequence[str]) -> None:
        self.cycle = tuple(cycle)
        # The argument, so that the error can be pickled; __str__ makes the message.
        super().__init__(cycle)

    def __str__(self) -> str:
        names = [repr(name) for name in self.cycle]
        # The ends stay, so that the message still shows that the cycle closes.
        if len(names) > MOST_LISTED:
            names[MOST_LISTED - 1 : -1] = [f"{len(names) - MOST_LISTED} more"]
        return " after ".join(names)


def topological(rank: Mapping[str, tuple[int, ...]], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the tasks in a topological order, by Kahn's algorithm.

    Args:
        rank: Task to its rank: of the tasks that are ready, the one with the least rank is next.
        edges: (consumer, producer) pairs.

    Raises:
        CycleError: There is no topological order.
    """
    producers: dict[str, set[str]] = {name: set() for name in rank}
    consumers: dict[str, set[str]] = {name: set() for name in rank}
    for consumer, producer in edges:
        producers[consumer].add(producer)
        consumers[producer].add(consumer)
    # How many producers of each task are still to come. Sets drop repeated edges, which would
    # otherwise be counted twice.
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
    # The tasks left over each wait for another one that is left over.
    if len(order) < len(rank):
        raise CycleError(_cycle(producers, set(rank) - set(order)))
    return order


def _cycle(producers: Mapping[str, set[str]], left: set[str]) -> list[str]:
    """Return one cycle among the tasks left over, each of which waits for another one of them."""
    # Follow producers until a task repeats; the least name makes the message deterministic.
    name = min(left)
    path: dict[str, None] = {}
    while name not in path:
        path[name] = None
        name = min(producers[name] & left)
    # The path may lead into the cycle from outside: it is cut where the cycle begins.
    names = [*path]
    return [*names[names.index(name) :], name]
