"""A plan to be made, as a loop of operations: what a scheduler needs to know, and no more.

Every task is one or two *operations*: its host work, which a thread runs, and on a device with
streams its device work, which a stream runs. Edges between operations carry a distance in
iterations. An operation takes some *holds*: what only one operation at a time can have.

    task v      host v  ──>  device v         nodes v and n + v
    (c, p, d)   host p  ──>  host c           the producer is submitted first
                device p ──> device c         and its device work is done first

Threads are not among the holds: to find them is the planner's task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.limits import Limits

LOCK = "the interpreter lock"
TURN = "the turn of globally ordered tasks"
CALLERS_STREAM = "the caller's stream"

SAME = 1e-9
"""Intervals that differ by less than this part are the same."""


class HoldKind(Enum):
    """Who has what is held, of several that want it."""

    RESOURCE = 0
    """Who comes first."""
    LOCK = 1
    """Who comes first of those that have their resources."""
    TURN = 2
    """Tasks by turns, on their threads, in the order of the plan."""
    STREAM = 3
    """What was submitted first."""


class Edge(NamedTuple):
    """The head on iteration i begins no sooner than ``time_us`` after the tail on i - distance."""

    tail: int
    head: int
    time_us: float
    distance: int


class Hold(NamedTuple):
    """An operation has ``what`` to itself for the first ``time_us`` of its time."""

    what: int
    time_us: float


@dataclass(frozen=True, slots=True)
class LoopGraph:
    """What a modulo scheduler schedules. Tasks are numbers in the order of the schedule.

    Attributes:
        names: The tasks' names; of ``size`` tasks.
        streams: Whether there are device operations; where not, all cost is host time.
        host_us: Task to time on its thread.
        device_us: Task to time on its stream; 0 without streams.
        stream: Task to the number of its stream; -1 without streams. 0 is the caller's.
        holds: Operation to what it holds, threads aside; ``2 * size`` entries.
        resources: Names of what is held.
        kinds: And of what kind they are.
        edges: Dependences between operations, from host work to device work, and those that keep
            frozen tasks in one period.
        deps: (consumer, producer, distance) between tasks.
        frozen: Tasks that stay on the caller's thread, in the last stage.
        last: These, and all that come after them in their iteration: they can only be in the last
            stage as well.
        serial: The tasks in the order of a serial run.
        least_stages: Task to the least stage it can have: above 0 only where ``same_period_deps``
            reach into later iterations.
        handover_us: What a wait for another thread costs.
    """

    names: tuple[str, ...]
    streams: bool
    host_us: tuple[float, ...]
    device_us: tuple[float, ...]
    stream: tuple[int, ...]
    holds: tuple[tuple[Hold, ...], ...]
    resources: tuple[str, ...]
    kinds: tuple[HoldKind, ...]
    edges: tuple[Edge, ...]
    deps: tuple[tuple[int, int, int], ...]
    frozen: frozenset[int]
    last: frozenset[int]
    serial: tuple[int, ...]
    least_stages: tuple[int, ...]
    handover_us: float

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self.names)

    @property
    def busiest_us(self) -> float:
        """What each iteration takes of the busiest thing that is held."""
        load = [0.0] * len(self.resources)
        for holds in self.holds:
            for hold in holds:
                load[hold.what] += hold.time_us
        return max(load, default=0.0)

    def time_us(self, operation: int) -> float:
        """How long an operation takes."""
        n = len(self.names)
        return self.host_us[operation] if operation < n else self.device_us[operation - n]


def loop_graph(plan: PipelinePlan, costs: CostModel, limits: Limits, *, streams: bool) -> LoopGraph:
    """What there is to schedule; ``same_period_deps`` count as the stages of ``plan`` make them.

    Raises:
        PlanError: A task has no cost, or a frozen task is unknown.
    """
    limits.check(plan)
    names = tuple(plan.schedule)
    rows = list(costs.of(names).values())
    index = {name: v for v, name in enumerate(names)}
    resolved = resolve_plan(plan)
    deps = tuple((index[d.consumer], index[d.producer], d.distance) for d in resolved.dependences)
    frozen = frozenset(index[name] for name in limits.frozen)
    host = tuple(c.host_us if streams else c.total_us for c in rows)
    device = tuple(c.device_us if streams else 0.0 for c in rows)
    stream_ids: dict[object, int] = {None: 0}
    stream = tuple(
        stream_ids.setdefault(plan.schedule[name].stream, len(stream_ids)) if streams else -1
        for name in names
    )
    kinds, holds = _holds(plan, rows, streams, limits.threads > 1)
    return LoopGraph(
        names=names,
        streams=streams,
        host_us=host,
        device_us=device,
        stream=stream,
        holds=holds,
        resources=tuple(kinds),
        kinds=tuple(kinds.values()),
        edges=tuple(_edges(host, device, deps, frozen, streams)),
        deps=deps,
        frozen=frozen,
        last=_after(deps, frozen),
        serial=tuple(index[name] for name in resolved.serial_order),
        least_stages=_least_stages(len(names), deps),
        handover_us=costs.handover_us,
    )


def _holds(
    plan: PipelinePlan, rows: Sequence[TaskCost], streams: bool, threaded: bool
) -> tuple[dict[str, HoldKind], tuple[tuple[Hold, ...], ...]]:
    """What is held, and by operation the holds."""
    users: dict[tuple[str, HoldKind], list[tuple[int, float]]] = defaultdict(list)
    n = len(rows)
    for v, (entry, cost) in enumerate(zip(plan.schedule.values(), rows, strict=True)):
        on_device = streams and cost.device_us > 0
        host = cost.host_us if streams else cost.total_us
        for resource in dict.fromkeys(cost.resources):
            use = (n + v, cost.device_us) if on_device else (v, host)
            users[resource, HoldKind.RESOURCE].append(use)
        if streams:
            stream = CALLERS_STREAM if entry.stream is None else f"stream {entry.stream!r}"
            users[stream, HoldKind.STREAM].append((n + v, cost.device_us))
            if entry.stream is not None and threaded:
                users[f"submission to {stream}", HoldKind.TURN].append((v, host))
        if cost.gil_us and threaded:
            users[LOCK, HoldKind.LOCK].append((v, cost.gil_us))
        if entry.globally_ordered and threaded:
            users[TURN, HoldKind.TURN].append((v, host))
    kept = [what for what, uses in users.items() if len(uses) > 1]
    holds: list[list[Hold]] = [[] for _ in range(2 * n)]
    for number, what in enumerate(kept):
        for operation, time_us in users[what]:
            holds[operation].append(Hold(number, time_us))
    return dict(kept), tuple(map(tuple, holds))


def _edges(
    host: Sequence[float],
    device: Sequence[float],
    deps: Sequence[tuple[int, int, int]],
    frozen: frozenset[int],
    streams: bool,
) -> list[Edge]:
    n = len(host)
    edges = [Edge(p, c, host[p], d) for c, p, d in deps]
    if streams:
        edges += [Edge(v, n + v, host[v], 0) for v in range(n)]
        edges += [Edge(n + p, n + c, device[p], d) for c, p, d in deps]
    # In one period on one thread: the next iteration's begin once all of this one's have ended.
    edges += [Edge(u, v, host[u], 1) for u in sorted(frozen) for v in sorted(frozen) if u != v]
    return edges


def _after(deps: Sequence[tuple[int, int, int]], first: frozenset[int]) -> frozenset[int]:
    found = set(first)
    while more := {c for c, p, d in deps if d <= 0 and p in found} - found:
        found |= more
    return frozenset(found)


def _least_stages(size: int, deps: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    stages = [0] * size
    if any(d < 0 for _, _, d in deps):
        for _ in range(size):
            for c, p, d in deps:
                stages[c] = max(stages[c], stages[p] - d)
    return tuple(stages)
