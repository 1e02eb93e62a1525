r"""Compile a plan into a short list of instructions per thread group.

                     period p                              period p + 1
    default  <admit> . forward . backward . step . <retire> | <admit> . forward ...
                 \        ^                                      \
    io            `-> h2d -'                                       `-> h2d ...

A *lane* is one thread group's instructions, run over and over, once per period. Two instructions
are swpipe's own and frame the default lane: ``<admit>`` pulls a batch and waits until the iteration
``depth`` before it is done; ``<retire>`` comes after all other tasks of an iteration and hands its
context out. With them, everything that orders anything is a dependence with a distance:

- what the plan declares;
- every task comes after ``<admit>`` of its iteration, and ``<retire>`` after every task;
- globally ordered tasks form a chain in period order, and so do tasks that name the same stream.
  Such a chain binds periods, not iterations, and needs the host only.

``<admit>`` comes first in its period, so that worker lanes get their batch at once. On a device
with streams it comes right before the first task that works on the new iteration: the host waits
there for an older iteration's device work, and what it has submitted before keeps the device busy.

Stages are shifted so that ``<admit>`` has stage 0 and ``<retire>`` stage depth - 1: where a plan's
depth is more than its last stage + 1, its tasks move back by the difference, and worker lanes may
run that far ahead.

**Two kinds of wait.** A *host wait* keeps a lane until another lane has passed an instruction; it
is needed where an edge crosses lanes. An *event wait* makes a stream wait for work on another
stream; it is needed where an edge crosses streams. An edge implied by others is dropped, in each
kind on its own:

- Host waits are a graph over (period, position): a wait is implied by a path of no greater lag.
  Lanes do their host waits even for iterations that do not exist, so prologue and epilogue need no
  case of their own.
- Event waits are a graph over iterations: a wait is implied by a path of no greater distance
  through event waits and stream order. All distances on such a path are >= 0, so an iteration on it
  exists whenever the two at its ends do. Edges of negative distance (some ``same_period_deps``) are
  neither dropped nor used to drop others.

No cycle can exist: every host wait points backwards in (period, order).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from swpipe.dependence import Dependence, dependences, period_order
from swpipe.plan import DEFAULT_GROUP, PipelinePlan, StreamRef

ADMIT = "<admit>"
RETIRE = "<retire>"


class HostWait(NamedTuple):
    """Keep this lane until ``lane`` has passed ``position`` in the period ``lag`` before."""

    lane: int
    position: int
    lag: int
    producer: str


class EventWait(NamedTuple):
    """Make this task's stream wait for ``producer``'s work on the iteration ``distance`` before."""

    producer: str
    distance: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One task's turn in its lane.

    Attributes:
        task: Its name; ``<admit>`` and ``<retire>`` are swpipe's own.
        stage: Shifted stage: in period p it works on iteration p - stage; from 0.
        lane: Index of its lane in the program.
        position: Its index within the lane, from 0.
        stream: As in the plan; None where the device has no streams.
        host_waits: To be done before it, in every period.
        event_waits: To be done on its stream, where the iteration concerned exists.
        record: Some other stream will wait for it: record its event.
        publish: Some other lane will wait for it: publish the lane's progress right after it.
    """

    task: str
    stage: int
    lane: int
    position: int
    stream: StreamRef
    host_waits: tuple[HostWait, ...]
    event_waits: tuple[EventWait, ...]
    record: bool
    publish: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """One thread group: its name and its instructions, in the order in which it runs them."""

    group: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled plan.

    Attributes:
        lanes: The default lane first, then worker lanes in the order of the schedule.
        depth: How many iterations may be in flight.
        ring: How many iterations' events are held: depth + the largest distance.
        order: All tasks in period order, without swpipe's own two.
    """

    lanes: tuple[Lane, ...]
    depth: int
    ring: int
    order: tuple[str, ...]

    @property
    def instructions(self) -> dict[str, Instruction]:
        """Task name to its instruction."""
        return {ins.task: ins for lane in self.lanes for ins in lane.instructions}


class _Hop(NamedTuple):
    """An edge of a reduction graph; ``weight`` is a lag or a distance, and never negative."""

    producer: str
    consumer: str
    weight: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where every task stands: what the waits are derived from."""

    order: tuple[str, ...]
    stage: dict[str, int]
    group: dict[str, str]
    stream: dict[str, StreamRef]
    deps: tuple[Dependence, ...]

    def lag(self, dep: Dependence) -> int:
        return self.stage[dep.consumer] - self.stage[dep.producer] + dep.distance


def compile_plan(plan: PipelinePlan, *, streams: bool, record_all: bool = False) -> Program:
    """Compile a plan that has been verified.

    Args:
        plan: The plan; ``swpipe.verify.check`` finds nothing wrong with it.
        streams: Whether the device has streams; where not, those of the plan mean nothing.
        record_all: Record every task's event, needed or not (for hunting trouble).
    """
    layout = _layout(plan, streams)
    waits = _host_waits(layout, plan)
    events = _event_waits(layout) if streams else {}
    recorded = {hop.producer for hops in events.values() for hop in hops}
    published = {hop.producer for hops in waits.values() for hop in hops}
    groups = list(dict.fromkeys([DEFAULT_GROUP, *(layout.group[n] for n in plan.schedule)]))
    members = {g: [n for n in layout.order if layout.group[n] == g] for g in groups}
    place = {n: (groups.index(g), i) for g in groups for i, n in enumerate(members[g])}

    def instruction(name: str) -> Instruction:
        lane, position = place[name]
        return Instruction(
            task=name,
            stage=layout.stage[name],
            lane=lane,
            position=position,
            stream=layout.stream[name],
            host_waits=tuple(
                HostWait(*place[h.producer], h.weight, h.producer) for h in waits[name]
            ),
            event_waits=tuple(EventWait(h.producer, h.weight) for h in events.get(name, ())),
            record=name in recorded or (streams and record_all and name != ADMIT),
            publish=name in published,
        )

    return Program(
        lanes=tuple(Lane(g, tuple(map(instruction, members[g]))) for g in groups),
        depth=plan.depth,
        ring=plan.depth + max((dep.distance for dep in layout.deps), default=0),
        order=tuple(name for name in layout.order if name in plan.schedule),
    )


def _layout(plan: PipelinePlan, streams: bool) -> _Layout:
    ahead = plan.depth - 1 - plan.max_stage
    names = tuple(plan.schedule)
    entries = plan.schedule.items()
    frame = (
        *(Dependence(name, ADMIT, 0, "admission") for name in names),
        *(Dependence(RETIRE, name, 0, "retirement") for name in (ADMIT, *names)),
    )
    order = list(period_order(plan))
    order.insert(_admission(plan, order, ahead, streams), ADMIT)
    return _Layout(
        order=(*order, RETIRE),
        stage={ADMIT: 0, RETIRE: plan.depth - 1, **{n: e.stage + ahead for n, e in entries}},
        group={
            ADMIT: DEFAULT_GROUP,
            RETIRE: DEFAULT_GROUP,
            **{n: e.thread_group for n, e in entries},
        },
        stream={
            ADMIT: None,
            RETIRE: None,
            **{n: e.stream if streams else None for n, e in entries},
        },
        deps=(*dependences(plan), *frame),
    )


def _admission(plan: PipelinePlan, order: Sequence[str], ahead: int, streams: bool) -> int:
    """The place of ``<admit>`` among the tasks of a period."""
    if not streams:
        return 0
    new = (k for k, name in enumerate(order) if plan.schedule[name].stage + ahead == 0)
    return next(new, len(order))


# ------------------------------------------------------------------------------------- host waits


def _host_waits(layout: _Layout, plan: PipelinePlan) -> dict[str, list[_Hop]]:
    """The host waits of every task, none implied by others; weights are lags."""
    crossing = {
        _Hop(dep.producer, dep.consumer, layout.lag(dep))
        for dep in layout.deps
        if layout.group[dep.producer] != layout.group[dep.consumer]
    }
    ordered = [n for n in layout.order if n in plan.schedule and plan.schedule[n].globally_ordered]
    for chain in (ordered, *_by_stream(layout).values()):
        crossing |= {
            h for h in _ring(chain) if layout.group[h.producer] != layout.group[h.consumer]
        }
    members: dict[str, list[str]] = defaultdict(list)
    for name in layout.order:
        members[layout.group[name]].append(name)
    program_order = [hop for chain in members.values() for hop in _ring(chain)]
    return _by_consumer(layout, _reduce(crossing, program_order))


def _by_stream(layout: _Layout) -> dict[StreamRef, list[str]]:
    chains: dict[StreamRef, list[str]] = defaultdict(list)
    for name in layout.order:
        if layout.stream[name] is not None:
            chains[layout.stream[name]].append(name)
    return chains


def _ring(chain: Sequence[str]) -> list[_Hop]:
    """A chain within a period, closed from its last task to its first of the period after."""
    if not chain:
        return []
    hops = [_Hop(a, b, 0) for a, b in pairwise(chain)]
    return [*hops, _Hop(chain[-1], chain[0], 1)]


# ------------------------------------------------------------------------------------ event waits


def _event_waits(layout: _Layout) -> dict[str, list[_Hop]]:
    """The event waits of every task, none implied by others; weights are distances."""
    crossing: set[_Hop] = set()
    fixed: list[_Hop] = []
    for dep in layout.deps:
        hop = _Hop(dep.producer, dep.consumer, dep.distance)
        if not _one_stream(layout.stream[dep.producer], layout.stream[dep.consumer]):
            crossing.add(hop)
        elif dep.distance >= 0:
            fixed.append(hop)
    for chain in _fifo_chains(layout):
        for hop in _ring(chain):
            # The later task on iteration i runs after the sooner one on i - distance; where that
            # lies in the future, a weaker truth will do: stream order holds between iterations.
            distance = hop.weight + layout.stage[hop.producer] - layout.stage[hop.consumer]
            fixed.append(_Hop(hop.producer, hop.consumer, max(0, distance)))
    return _by_consumer(layout, _reduce(crossing, fixed))


def _one_stream(a: StreamRef, b: StreamRef) -> bool:
    # A torch.Stream takes whatever it is compared with for a stream, and never differs from None.
    return isinstance(a, torch.Stream) == isinstance(b, torch.Stream) and a == b


def _fifo_chains(layout: _Layout) -> list[list[str]]:
    """Tasks whose device work is known to be queued in period order on one stream.

    Tasks that name a stream are submitted in that order. Those on the caller's stream are only
    where one thread submits them.
    """
    chains: dict[object, list[str]] = defaultdict(list)
    for name in layout.order:
        if name == ADMIT:  # its event is recorded for some batches only: nothing leads through it
            continue
        stream = layout.stream[name]
        chains[(None, layout.group[name]) if stream is None else stream].append(name)
    return list(chains.values())


# -------------------------------------------------------------------------------------- reduction


def _by_consumer(layout: _Layout, hops: Iterable[_Hop]) -> dict[str, list[_Hop]]:
    index = {name: i for i, name in enumerate(layout.order)}
    waits: dict[str, list[_Hop]] = {name: [] for name in layout.order}
    for hop in sorted(hops, key=lambda h: (h.weight, index[h.producer])):
        waits[hop.consumer].append(hop)
    return waits


def _reduce(edges: Iterable[_Hop], fixed: Iterable[_Hop]) -> set[_Hop]:
    """Drop every edge that a path of no greater weight through the rest and ``fixed`` implies.

    Edges of negative weight stay, and no path leads through them.
    """
    kept = set(edges)
    out: dict[str, set[_Hop]] = defaultdict(set)
    for hop in (*kept, *fixed):
        if hop.weight >= 0:
            out[hop.producer].add(hop)
    always = set(fixed)
    for hop in sorted(kept, key=lambda h: (-h.weight, h)):
        if hop.weight < 0:
            continue
        if hop not in always:
            out[hop.producer].discard(hop)
        if hop in always or _reaches(out, hop):
            kept.discard(hop)
        else:
            out[hop.producer].add(hop)
    return kept


def _reaches(out: dict[str, set[_Hop]], edge: _Hop) -> bool:
    """Whether a path of no more than the edge's weight leads from its producer to its consumer."""
    best: dict[str, int] = {}
    heap = [(0, edge.producer)]
    while heap:
        weight, name = heapq.heappop(heap)
        for hop in out[name]:
            total = weight + hop.weight
            if total > edge.weight or best.get(hop.consumer, total + 1) <= total:
                continue
            if hop.consumer == edge.consumer:
                return True
            best[hop.consumer] = total
            heapq.heappush(heap, (total, hop.consumer))
    return False
