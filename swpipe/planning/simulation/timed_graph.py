r"""A compiled program under a cost model as a timed event graph.

Each instruction has a node for its host work H and, on a device with streams, one for its device
work D::

    one thread  H a ---> H b ---> H c -.          instructions run in order;
                 |        |        |    `-> H a   the next period's first: lag 1
                 v        v        v
    streams     D a      D b ---> D c             the same stream, or an event wait
    two threads H a ---> H d                      a host wait: D a is submitted, not finished
    throttle    D <retire> ---> H <throttle>      iteration i - run_ahead is finished

Each node is executed once per period, and an arc has the lag between its ends in periods. Without
contention the interval of the program is the *maximum cycle ratio* of this graph (F. Baccelli et
al., "Synchronization and Linearity", 1992).

*Contended* are resources that are granted in no fixed order, to whoever requests them first:

- the interpreter lock, if tasks of two or more thread groups hold it;
- a named resource that tasks on two or more rows use (a row is a thread or a stream);
- the caller's stream, if tasks of two or more thread groups submit to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from swpipe._engine.program import ADMIT, RETIRE, SOURCES, THROTTLE, Instruction, Program
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PULL, StreamRef
from swpipe.planning.simulation.cycles import Arc, ticks
from swpipe.trace.span import Row

LOCK = "interpreter lock"
"""The name of the lock among the resources."""


class Node(NamedTuple):
    """The host or the device work of one instruction.

    Attributes:
        task: The instruction's task.
        stage: As in the program: in period p it works on iteration p - stage.
        row: The thread group or the stream.
        time: Duration in ticks.
        lock: The first so many of these ticks need the interpreter lock; 0 if no other thread
            holds it.
        resources: Contended resources that it holds from start to end.
        previous: For host work, the node before it on its thread; for the thread's first, its last.
        first: Whether it is the first on its thread.
    """

    task: str
    stage: int
    row: Row
    time: int
    lock: int = 0
    resources: tuple[str, ...] = ()
    previous: int = -1
    first: bool = False


@dataclass(frozen=True, slots=True)
class TimedGraph:
    """Nodes and arcs of a program.

    Attributes:
        nodes: Host work in the order of the program, then device work.
        arcs: Their ``distance`` is a lag in periods; tails of arcs of lag 0 come before heads.
        optional: The last so many arcs apply only if both iterations exist.
        depth: Of the program.
        retire: The node that ends an iteration.
        queue: Device work on the caller's stream in the order of submission by several threads;
            empty if one thread submits, since the arcs then fix the order.
        device_of: Host node to its device node.
        load: Row, resource or lock to the ticks per iteration in which it is busy.
        users: Resource or lock to the tasks that use it.
    """

    nodes: tuple[Node, ...]
    arcs: tuple[Arc, ...]
    optional: int
    depth: int
    retire: int
    queue: frozenset[int]
    device_of: Mapping[int, int]
    load: Mapping[Row | str, int]
    users: Mapping[str, tuple[str, ...]]

    @property
    def contended(self) -> bool:
        """Whether anything is granted in no fixed order, so that the arcs do not fix all times."""
        return bool(self.queue) or any(node.lock or node.resources for node in self.nodes)

    @property
    def reach(self) -> int:
        """Periods over which one execution can affect another directly."""
        return self.depth + max(arc.distance for arc in self.arcs) + 1


def host_time(cost: TaskCost, streams: bool) -> int:
    """Ticks on the thread; on a device without streams all work is done there."""
    return ticks(cost.host_us) + (0 if streams else ticks(cost.device_us))


def timed_graph(program: Program, costs: CostModel, *, streams: bool, least: int = 0) -> TimedGraph:
    """The graph of a program compiled with the same ``streams``.

    Every instruction takes ``least`` ticks of its thread or more.
    """
    return _Builder(program, costs, streams, least).build()


class _Builder:
    def __init__(self, program: Program, costs: CostModel, streams: bool, least: int) -> None:
        self.program = program
        self.streams = streams
        self.handover = ticks(costs.handover_us)
        known = costs.of(program.tasks)
        puller = PULL if PULL in program.instructions else ADMIT
        known[puller] = costs.tasks.get(PULL, TaskCost())
        found = program.instructions
        self.instructions = order = [found[name] for name in program.order]
        self.costs = [known.get(ins.task, TaskCost()) for ins in order]
        self.times = [max(least, host_time(cost, streams)) for cost in self.costs]
        self.host = {ins.task: k for k, ins in enumerate(order)}
        self.device: dict[str, int] = {}
        if streams:
            for ins, cost in zip(order, self.costs, strict=True):
                if _queues(ins, cost):
                    self.device[ins.task] = len(order) + len(self.device)
        threads = [Row("thread", lane.group) for lane in program.lanes]
        queues = {s: Row("stream", stream_name(s)) for s in {ins.stream for ins in order}}
        self.rows = [threads[ins.lane] for ins in order]
        self.stream_rows = [queues[ins.stream] for ins in order]

    def build(self) -> TimedGraph:
        nodes = self._nodes()
        fixed, optional = tuple(self._fixed(nodes)), tuple(self._optional(nodes))
        return TimedGraph(
            nodes=tuple(nodes),
            arcs=(*fixed, *optional),
            optional=len(optional),
            depth=self.program.depth,
            retire=(self.device if self.streams else self.host)[RETIRE],
            queue=frozenset(self._shared_queue()),
            device_of={self.host[task]: node for task, node in self.device.items()},
            load=self._load(),
            users=self._users(),
        )

    # ------------------------------------------------------------------ nodes

    def _nodes(self) -> list[Node]:
        before = {
            ins.task: self.host[previous.task]
            for lane in self.program.lanes
            for previous, ins in pairwise((lane.instructions[-1], *lane.instructions))
        }
        shared = self._contended_resources()
        lockers = {r for r, cost in zip(self.rows, self.costs, strict=True) if cost.gil_us}
        nodes, device = [], []
        for ins, cost, time, row, stream_row in zip(
            self.instructions, self.costs, self.times, self.rows, self.stream_rows, strict=True
        ):
            held = tuple(r for r in cost.resources if r in shared) if shared else ()
            on_device = self.streams and cost.device_us > 0
            lock = ticks(cost.gil_us) if len(lockers) > 1 else 0
            here = () if on_device else held
            first = ins.position == 0
            nodes.append(Node(ins.task, ins.stage, row, time, lock, here, before[ins.task], first))
            if ins.task in self.device:
                there = held if on_device else ()
                device.append(
                    Node(ins.task, ins.stage, stream_row, ticks(cost.device_us), 0, there)
                )
        return nodes + device

    def _contended_resources(self) -> set[str]:
        users: dict[str, set[Row]] = defaultdict(set)
        for cost, row, stream_row in zip(self.costs, self.rows, self.stream_rows, strict=True):
            for resource in cost.resources:
                users[resource].add(stream_row if self.streams and cost.device_us else row)
        # A stream that several threads submit to is one row: it is in order.
        return {resource for resource, rows in users.items() if len(rows) > 1}

    def _shared_queue(self) -> list[int]:
        if not self.streams:
            return []
        own = [ins for ins in self.instructions if ins.stream is None and ins.task in self.device]
        return [self.device[i.task] for i in own] if len({ins.lane for ins in own}) > 1 else []

    # ------------------------------------------------------------------- arcs

    def _fixed(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        for ins in self.instructions:
            here = self.host[ins.task]
            previous = nodes[here].previous
            lag = int(ins.position == 0)
            yield Arc(previous, here, nodes[previous].time, lag)
            for wait in ins.host_waits:
                # The wait is for the instruction at this position of the other thread.
                lane = self.program.lanes[wait.lane]
                passed = self.host[lane.instructions[wait.position].task]
                yield Arc(passed, here, nodes[passed].time + self.handover, wait.lag)
            if ins.task in self.device:
                yield Arc(here, self.device[ins.task], nodes[here].time, 0)
        for chain in self._queues():
            for a, b in pairwise(chain):
                yield Arc(a, b, nodes[a].time, 0)
            yield Arc(chain[-1], chain[0], nodes[chain[-1]].time, 1)

    def _queues(self) -> Iterable[list[int]]:
        """Device work of each stream, in the order of submission within a period."""
        chains: dict[StreamRef, list[int]] = defaultdict(list)
        for ins in self.instructions:
            if ins.task in self.device:
                chains[ins.stream].append(self.device[ins.task])
        if self._shared_queue():
            chains.pop(None)
        return chains.values()

    def _optional(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        """Event waits and ``<throttle>``, which apply between iterations."""
        if not self.streams:
            return
        stage = {ins.task: ins.stage for ins in self.instructions}
        for ins in self.instructions:
            for wait in ins.event_waits:
                if wait.producer in self.device:  # the batch itself is assumed to be on the host
                    tail, head = self.device[wait.producer], self.device[ins.task]
                    lag = stage[ins.task] - stage[wait.producer] + wait.distance
                    yield Arc(tail, head, nodes[tail].time, lag)
        if (limit := self.program.launch_limit) is not None:
            done = self.device[RETIRE]
            yield Arc(done, self.host[THROTTLE], nodes[done].time + self.handover, limit)

    # ------------------------------------------------------------------- load

    def _load(self) -> dict[Row | str, int]:
        load: dict[Row | str, int] = defaultdict(int)
        for cost, time, row, stream_row in zip(
            self.costs, self.times, self.rows, self.stream_rows, strict=True
        ):
            load[row] += time
            if self.streams:
                load[stream_row] += ticks(cost.device_us)
            for resource in cost.resources:
                held = cost.device_us if self.streams and cost.device_us else cost.total_us
                load[resource] += ticks(held)
            if cost.gil_us:
                load[LOCK] += ticks(cost.gil_us)
        return dict(load)

    def _users(self) -> dict[str, tuple[str, ...]]:
        users: dict[str, list[str]] = defaultdict(list)
        for ins, cost in zip(self.instructions, self.costs, strict=True):
            for resource in (*cost.resources, *((LOCK,) if cost.gil_us else ())):
                users[resource].append(ins.task)
        return {resource: tuple(tasks) for resource, tasks in users.items()}


def _queues(ins: Instruction, cost: TaskCost) -> bool:
    """Whether an instruction submits anything to its stream: work, a wait or an event."""
    waits = any(wait.producer not in SOURCES for wait in ins.event_waits)
    own = ins.task in SOURCES
    return ins.task == RETIRE or cost.device_us > 0 or (not own and (waits or ins.record))
