"""The compiler, which turns a plan into a list of instructions for each thread group.

A *lane* is one thread group's instructions, run once per period. Two instructions are swpipe's own
and frame the default lane: ``<admit>`` begins an iteration, when the device is not too far behind,
and pulls its batch; ``<retire>`` comes after all other tasks of an iteration and hands its context
out. If the plan names a group that pulls, ``<pull>`` takes the batch in that group, after
``<admit>``, also while the caller is between two calls. Every order is thus a dependence with a
distance:

- what the plan declares;
- every task comes after ``<admit>`` and ``<pull>`` of its iteration, and ``<retire>`` after every
  task;
- globally ordered tasks form a chain in period order, and so do tasks that name the same stream.
  Such a chain binds periods, not iterations, and needs the host only.

Without streams, or with ``<pull>``, ``<admit>`` comes first: worker lanes wait for it.
With streams it comes right before the first task of the new iteration, so that the device has work
while a batch is pulled. It waits there until the device has finished the iteration
``depth + launch_limit`` before. With a limit of 1 or more the work of a whole period has been
launched by then, wherever in the period ``<admit>`` stands. No other instruction waits for the
device.

A plan may forbid that tasks run between two calls (``within_calls``). In each period worker lanes
then begin after the head of the caller's lane, and ``<retire>`` comes after their last tasks. The
head is ``<admit>`` or, if that does not come first, ``<begin>``, which does nothing.

A group may have several *workers*, threads that take turns: each period of its lane is run by one
worker. The lane's order therefore binds only periods that are a multiple of the number of workers
apart. Orders between nearer periods (a declared dependence, global order, a stream's order) need
waits between workers.

Stages are shifted: ``<admit>`` has stage 0 and ``<retire>`` stage depth - 1. If a plan's depth is
more than its last stage + 1, its tasks move to later stages by the difference, and worker lanes may
run that many periods ahead.

**Two kinds of wait.** A *host wait* keeps a lane until another lane has passed an instruction, for
edges that cross lanes. An *event wait* makes a stream wait for work on another stream, for edges
that cross streams and are not ``host_only``. An edge that other edges imply is dropped, for each
kind separately:

- Host waits are a graph over (period, position): a path of no greater lag implies a wait, if one of
  its ends runs in period order, that is, is not in a group of several workers. Lanes do their host
  waits even for iterations that do not exist: prologue and epilogue are no special case.
- A task of the host alone (``HOST``) is on no stream and has no event. The streams of its consumers
  wait for the device work of its producers: event waits lead through it.
- Event waits are a graph over iterations: a path of no greater distance through event waits and
  stream order implies a wait. Its distances are >= 0, so that an iteration on it exists whenever
  those at its ends do. Edges of negative distance are neither dropped nor used to drop others.

No cycle can exist: every host wait points backwards in (period, order).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from swpipe.core.plan import (
    DEFAULT_GROUP,
    HOST,
    PULL,
    PipelinePlan,
    StreamRef,
    TaskSchedule,
)
from swpipe.core.resolved import ResolvedPlan
from swpipe.program.implied_edges import Hop, reduce_edges

ADMIT = "<admit>"
BEGIN = "<begin>"
RETIRE = "<retire>"
OWN = (ADMIT, BEGIN, PULL, RETIRE)
"""The instructions that swpipe adds to those of the plan's tasks."""

SOURCES = (ADMIT, PULL)
"""The instructions that pull batches; they record an event only for batches with device work."""


class HostWait(NamedTuple):
    """A wait until ``lane`` has passed ``position`` in the period ``lag`` before.

    ``lane`` may be the waiting lane itself, if the lane has several workers: the earlier period was
    another worker's turn.
    """

    lane: int
    position: int
    lag: int
    producer: str


class EventWait(NamedTuple):
    """A stream's wait for ``producer``'s device work on the iteration ``distance`` before."""

    producer: str
    distance: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """A task's place in its lane, with everything that it waits for.

    Attributes:
        task: The task's name; those in ``OWN`` are swpipe's own.
        stage: The shifted stage, from 0: in period p the task works on iteration p - stage.
        lane: The lane's index in the program.
        position: The index in the lane's instructions.
        stream: The stream as in the plan, ``HOST`` included; None if the device has no streams.
        on_host: Whether it is a task of the host alone, on a device with streams.
        host_waits: Waits of the lane before the task, in every period.
        event_waits: Waits of the task's stream, for iterations that exist.
        record: Whether to record the task's event, because another stream waits for it.
        publish: Whether to publish the lane's progress right after the task, because another lane
            or the caller may wait for it.
    """

    task: str
    stage: int
    lane: int
    position: int
    stream: StreamRef = None
    on_host: bool = False
    host_waits: tuple[HostWait, ...] = ()
    event_waits: tuple[EventWait, ...] = ()
    record: bool = False
    publish: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """One thread group: its name and its instructions, in the order in which it runs them.

    The ``workers`` threads of the group take turns, period by period.
    """

    group: str
    instructions: tuple[Instruction, ...]
    workers: int = 1

    def turn(self, period: int) -> int:
        """Return the worker whose turn a period is: iteration i belongs to worker i % workers."""
        return (period - self.instructions[0].stage) % self.workers

    @property
    def threads(self) -> tuple[str, ...]:
        """The name of each worker thread; a single worker has the name of its group."""
        if self.workers == 1:
            return (self.group,)
        return tuple(f"{self.group} {number}" for number in range(self.workers))


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled plan.

    Attributes:
        lanes: The default lane first, then worker lanes in the order of the schedule.
        depth: How many iterations may be in flight.
        ring: The number of iterations for which events are kept: depth + the largest distance.
        order: The names of all instructions in period order.
        launch_limit: How many iterations beyond ``depth`` the host may launch before the device has
            finished them; None for no limit.
        resolved: The plan that was compiled.
        streams: Whether it was compiled for a device with streams.
    """

    lanes: tuple[Lane, ...]
    depth: int
    ring: int
    order: tuple[str, ...]
    launch_limit: int | None
    resolved: ResolvedPlan = field(compare=False, repr=False)
    streams: bool = field(compare=False)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The plan's tasks in period order."""
        return tuple(name for name in self.order if name not in OWN)

    @property
    def instructions(self) -> dict[str, Instruction]:
        """The instruction of each task, by name."""
        return {ins.task: ins for lane in self.lanes for ins in lane.instructions}


class _Place(NamedTuple):
    """A place in the period: the first fields of its instruction."""

    task: str
    stage: int
    lane: int
    position: int
    stream: StreamRef
    on_host: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """The input of the wait computation: places in the period, and the edges between them.

    Attributes:
        places: All places, in period order.
        queue: The number of the stream at each place; 0 for None, -1 for ``HOST``.
        ordered: The places of globally ordered tasks.
        members: The places of each lane.
        workers: The number of threads of each lane.
        deps: Declared dependences, and those of admission and retirement; weights are distances.
        host_only: The dependences among ``deps`` that no stream waits for.
        within_call: Edges that keep lanes within the caller's calls, in each period; weights are
            lags.
    """

    places: Sequence[_Place]
    queue: Sequence[int]
    ordered: Sequence[int]
    members: Sequence[Sequence[int]]
    workers: Sequence[int]
    deps: Sequence[Hop]
    host_only: Set[Hop]
    within_call: Sequence[Hop]


def compile_plan(resolved: ResolvedPlan, *, streams: bool) -> Program:
    """Compile a plan into a program.

    Args:
        resolved: The plan, validated (``swpipe.analysis.validation``).
        streams: Whether the device has streams; if not, the plan's streams are ignored.
    """
    plan = resolved.plan
    depth = plan.depth
    layout = _layout(resolved, depth, streams)
    waits = _host_waits(layout)
    events = _event_waits(layout) if streams else [[] for _ in waits]
    # An instruction records an event, or publishes its progress, only if a reduced edge begins
    # there: every event and every publication costs host time in each period.
    recorded = {hop.producer for hops in events for hop in hops}
    published = {hop.producer for hops in waits for hop in hops}
    # Every worker publishes its last instruction, so that a worker that fails can wait until the
    # others have passed the earlier iterations.
    published |= {m[-1] for m, n in zip(layout.members, layout.workers, strict=True) if n > 1}
    at = layout.places
    instructions = [
        Instruction(
            *place,
            host_waits=tuple(
                [HostWait(at[p].lane, at[p].position, lag, at[p].task) for p, _, lag in waits[k]]
            ),
            event_waits=tuple([EventWait(at[p].task, distance) for p, _, distance in events[k]]),
            record=k in recorded,
            # The caller waits for the pulls of another thread.
            publish=k in published or place.task == PULL,
        )
        for k, place in enumerate(at)
    ]
    lanes = [
        Lane(group, tuple([instructions[k] for k in places]), workers)
        for group, places, workers in zip(
            plan.thread_groups, layout.members, layout.workers, strict=True
        )
    ]
    return Program(
        lanes=tuple(lanes),
        depth=depth,
        # Streams wait over declared distances, and over sums of distances through tasks of the
        # host.
        ring=depth + max([hop.weight for hops in (layout.deps, *events) for hop in hops]),
        order=tuple([place.task for place in at]),
        launch_limit=plan.launch_limit if streams else None,
        resolved=resolved,
        streams=streams,
    )


def _layout(resolved: ResolvedPlan, depth: int, streams: bool) -> _Layout:
    plan = resolved.plan
    last = plan.max_stage
    # A depth beyond the last stage + 1 moves all tasks to later stages: then batches are pulled
    # ``ahead`` periods before the first task needs them.
    ahead = depth - 1 - last
    order = _order(plan, resolved.period_order, ahead, streams)
    place = {name: k for k, name in enumerate(order)}
    retire = place[RETIRE]
    schedule = {**plan.schedule, ADMIT: TaskSchedule(-ahead), RETIRE: TaskSchedule(last)}
    schedule[BEGIN] = schedule[ADMIT]
    schedule[PULL] = TaskSchedule(-ahead, thread_group=plan.pull_group or DEFAULT_GROUP)
    entries = [schedule[name] for name in order]
    lanes = {group: lane for lane, group in enumerate(plan.thread_groups)}
    queues: dict[StreamRef, int] = {None: 0, HOST: -1}
    members: list[list[int]] = [[] for _ in lanes]
    workers = [1] * len(lanes)
    places: list[_Place] = []
    for k, entry in enumerate(entries):
        lane = lanes[entry.thread_group]
        stream = entry.stream if streams else None
        on_host = queues.setdefault(stream, len(queues)) < 0
        places.append(
            _Place(order[k], entry.stage + ahead, lane, len(members[lane]), stream, on_host)
        )
        members[lane].append(k)
        workers[lane] = entry.workers
    declared = {
        Hop(place[d.producer], place[d.consumer], d.distance): d.host_only
        for d in resolved.dependences
    }
    sources = [place[name] for name in SOURCES if name in place]
    within_call = [hop for w in members[1:] for hop in (Hop(0, w[0], 0), Hop(w[-1], retire, 0))]
    return _Layout(
        places=places,
        queue=[queues[place.stream] for place in places],
        ordered=[k for k, entry in enumerate(entries) if entry.globally_ordered],
        members=members,
        workers=workers,
        deps=[
            *declared,
            *[Hop(sooner, later, 0) for sooner, later in pairwise(sources)],
            *[Hop(sources[-1], k, 0) for k in range(retire) if order[k] not in OWN],
            *[Hop(k, retire, 0) for k in range(retire)],
        ],
        host_only={hop for hop, host_only in declared.items() if host_only},
        within_call=within_call if plan.within_calls else [],
    )


def _order(plan: PipelinePlan, tasks: Sequence[str], ahead: int, streams: bool) -> tuple[str, ...]:
    """Return the names of a period's instructions, swpipe's own included, in period order."""
    admit = 0
    if streams and plan.pull_group is None:
        # Pull right before the first task of the new iteration: the tasks before it give the device
        # work for the time of the pull.
        new = (k for k, name in enumerate(tasks) if plan.schedule[name].stage + ahead == 0)
        admit = next(new, len(tasks))
    head = (BEGIN,) if plan.within_calls and admit else ()
    sources = (ADMIT,) if plan.pull_group is None else SOURCES
    return (*head, *tasks[:admit], *sources, *tasks[admit:], RETIRE)


# ------------------------------------------------------------------------------------- host waits


def _host_waits(layout: _Layout) -> list[list[Hop]]:
    """Return the host waits at each place, without implied ones; weights are lags."""
    stage = [place.stage for place in layout.places]
    lane = [place.lane for place in layout.places]
    workers = layout.workers
    hops = [Hop(p, c, stage[c] - stage[p] + distance) for p, c, distance in layout.deps]
    hops += layout.within_call
    for chain in (layout.ordered, *_by_stream(layout)):
        hops += _ring(chain)
    # Only edges between two threads need a wait. Within a lane, two periods have the same worker if
    # they are a multiple of the number of workers apart.
    crossing = [
        hop
        for hop in hops
        if lane[hop.producer] != lane[hop.consumer] or hop.weight % workers[lane[hop.producer]]
    ]
    chains = zip(layout.members, workers, strict=True)
    program_order = [hop for chain, again in chains for hop in _ring(chain, again)]
    several = {place for place, n in enumerate(lane) if workers[n] > 1}
    return reduce_edges(crossing, program_order, range(len(stage)), several)


def _by_stream(layout: _Layout) -> Iterable[list[int]]:
    """Return the places of each named stream's tasks, in period order."""
    chains: dict[int, list[int]] = defaultdict(list)
    for place, queue in enumerate(layout.queue):
        if queue > 0:
            chains[queue].append(place)
    return chains.values()


def _ring(chain: Sequence[int], again: int = 1) -> list[Hop]:
    """Return a chain's edges, and one from its end to its start, ``again`` periods later."""
    if not chain:
        return []
    hops = [Hop(a, b, 0) for a, b in pairwise(chain)]
    return [*hops, Hop(chain[-1], chain[0], again)]


# ------------------------------------------------------------------------------------ event waits


def _event_waits(layout: _Layout) -> list[list[Hop]]:
    """Return the event waits at each place, without implied ones; weights are distances."""
    stage = [place.stage for place in layout.places]
    queue = layout.queue
    crossing: list[Hop] = []
    fixed: list[Hop] = []
    for hop in _through_the_host(layout):
        (fixed if queue[hop.producer] == queue[hop.consumer] else crossing).append(hop)
    for chain, again in _fifo_chains(layout):
        for a, b, lag in _ring(chain, again):
            # Task b on iteration i runs after task a on iteration i - distance. A negative distance
            # would name a later iteration; the weaker order with distance 0 holds too and is used
            # instead.
            fixed.append(Hop(a, b, max(0, lag + stage[a] - stage[b])))
    order = sorted(range(len(stage)), key=lambda k: (stage[k], k))
    # Tasks of one group of several workers share a stream, and no crossing edge joins two of them.
    # So no place has to be passed as ``several``.
    return reduce_edges(crossing, fixed, order)


def _through_the_host(layout: _Layout) -> list[Hop]:
    """Return the dependences between tasks with a stream, also paths through tasks without one.

    Of several paths between two tasks only the shortest is kept: one of the two streams runs its
    iterations in order, so that waiting for an iteration is waiting for those before it.
    """
    at = layout.places
    hops = [hop for hop in layout.deps if hop not in layout.host_only]
    for place in [place for place, queue in enumerate(layout.queue) if queue < 0]:
        into = [hop for hop in hops if hop.consumer == place != hop.producer]
        out = [hop for hop in hops if hop.producer == place != hop.consumer]
        hops = [hop for hop in hops if place not in hop[:2]]
        shortest: dict[tuple[int, int, int], Hop] = {}
        for before, after in product(into, out):
            # ``<admit>`` and ``<retire>`` have a direct edge with every task already.
            if at[before.producer].task not in SOURCES and at[after.consumer].task != RETIRE:
                hop = Hop(before.producer, after.consumer, before.weight + after.weight)
                # Iterations at negative distances may not exist, so each negative distance keeps
                # its own edge.
                key = (hop.producer, hop.consumer, min(hop.weight, 0))
                shortest[key] = min(hop, shortest.get(key, hop))
        hops += shortest.values()
    return hops


def _fifo_chains(layout: _Layout) -> Iterator[tuple[list[int], int]]:
    """Yield chains of tasks whose device work is queued on one stream in period order.

    Tasks that name a stream are submitted in that order. Tasks on the caller's stream are so only
    if one thread submits them; with several workers, only every ``workers`` periods.
    """
    for chain in _by_stream(layout):
        yield chain, 1
    for places, workers in zip(layout.members, layout.workers, strict=True):
        # A batch's event is recorded only for batches with device work: no path may lead through
        # it.
        tasks = [k for k in places if layout.places[k].task not in SOURCES]
        yield [k for k in tasks if layout.queue[k] == 0], workers
