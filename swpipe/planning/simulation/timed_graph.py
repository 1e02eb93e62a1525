r"""A compiled program under a cost model as a timed event graph.

Each instruction has a node for its host work H and, on a device with streams, one for its device
work D::

    one thread  H a ---> H b ---> H c -.          instructions run in order;
                 |        |        |    `-> H a   the next period's first: lag 1
                 v        v        v
    streams     D a      D b ---> D c             the same stream, or an event wait
    two threads H a ---> H d                      a host wait: D a is submitted, not finished
    blocks      H a, D a ---> R a ---> H b        a returns when its device work is done
    admission   D <retire> ---> H <admit>         iteration i - depth - launch limit is finished

Each node is executed once per period, and an arc has the lag between its ends in periods. Without
contention the interval of the program is the *maximum cycle ratio* of this graph (F. Baccelli et
al., "Synchronization and Linearity", 1992).

A stream does what it is given in the order of launch, and so does a named resource that device work
on several streams uses, such as a communicator. If one thread launches all of it, or if it is on
one stream with a name, that order is the program's: these are arcs.

*Contended* is what has no fixed order:

- such a stream or resource, if several threads launch its work: it is a *queue*, in the order in
  which they do;
- a named resource that host work uses besides work on another row (a row is a thread or a stream),
  and the interpreter lock, if tasks of two or more thread groups hold it: whoever requests them
  first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from swpipe._engine.program import ADMIT, RETIRE, SOURCES, Instruction, Program
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PULL
from swpipe.planning.simulation.cycles import Arc, ticks
from swpipe.trace.span import Row

LOCK = "interpreter lock"
"""The name of the lock among the resources."""

_FAR = 4
"""Without a limit, so many iterations beyond the depth are taken to be launched at most."""


class Node(NamedTuple):
    """The host or the device work of one instruction.

    Attributes:
        task: The instruction's task.
        stage: As in the program: in period p it works on iteration p - stage.
        row: The thread group or the stream.
        time: Duration in ticks.
        lock: The first so many of these ticks need the interpreter lock; 0 if no other thread
            holds it.
        resources: What goes to whoever requests it first, and is held from start to end.
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
        nodes: Host work in the order of the program, then device work, then returns.
        arcs: Their ``distance`` is a lag in periods.
        optional: The last so many arcs apply only if both iterations exist.
        depth: Of the program.
        run_ahead: How many iterations that were handed out the device may not have done yet; None
            for any number.
        retire: The node that ends an iteration.
        queues: Device node to the numbers of the queues in which it waits for its turn.
        device_of: Host node to its device node.
        returns: Host node of a task that blocks to the node of its return.
        load: Row, resource or lock to the ticks per iteration in which it is busy.
        users: Resource or lock to the tasks that use it.
    """

    nodes: tuple[Node, ...]
    arcs: tuple[Arc, ...]
    optional: int
    depth: int
    run_ahead: int | None
    retire: int
    queues: Mapping[int, tuple[int, ...]]
    device_of: Mapping[int, int]
    returns: Mapping[int, int]
    load: Mapping[Row | str, int]
    users: Mapping[str, tuple[str, ...]]

    @property
    def contended(self) -> bool:
        """Whether anything is granted in no fixed order, so that the arcs do not fix all times."""
        return bool(self.queues) or any(node.lock or node.resources for node in self.nodes)

    @property
    def in_flight(self) -> int:
        """How many iterations can have begun of which the device has not done all."""
        return self.depth + (self.run_ahead or 0)

    @property
    def reach(self) -> int:
        """Periods over which one execution can affect another directly."""
        return self.depth + max(arc.distance for arc in self.arcs) + 1

    def limited(self) -> TimedGraph:
        """The same, with a limit to the iterations that the host may be ahead of the device.

        Where there is none, one that leaves the interval as it is: the device has more work waiting
        than the threads are apart.
        """
        if self.run_ahead is not None:
            return self
        host = next(k for k, device in self.device_of.items() if device == self.retire)
        far = self.depth + _FAR
        arc = Arc(self.retire, host, self.nodes[self.retire].time, far)
        return replace(self, arcs=(*self.arcs, arc), optional=self.optional + 1, run_ahead=far)


def host_time(cost: TaskCost, streams: bool) -> int:
    """Ticks until the device work is launched; without streams all work is done on the thread."""
    return ticks(cost.host_us) + (0 if streams else ticks(cost.device_us))


def thread_time(cost: TaskCost, streams: bool) -> int:
    """Ticks on the thread, at least: it may wait for the device work."""
    return host_time(cost, streams and not cost.blocks)


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
                if _launches(ins, cost):
                    self.device[ins.task] = len(order) + len(self.device)
        blocking = [k for k, cost in enumerate(self.costs) if streams and cost.blocks]
        first = len(order) + len(self.device)
        self.returns = {k: first + number for number, k in enumerate(blocking)}
        threads = [Row("thread", lane.group) for lane in program.lanes]
        queues = {s: Row("stream", stream_name(s)) for s in {ins.stream for ins in order}}
        self.rows = [threads[ins.lane] for ins in order]
        self.stream_rows = [queues[ins.stream] for ins in order]

    def build(self) -> TimedGraph:
        chains, queues = self._launch_orders()
        nodes = self._nodes()
        fixed, optional = tuple(self._fixed(nodes, chains)), tuple(self._optional(nodes))
        turns: dict[int, list[int]] = defaultdict(list)
        for number, queue in enumerate(queues):
            for node in queue:
                turns[node].append(number)
        return TimedGraph(
            nodes=tuple(nodes),
            arcs=(*fixed, *optional),
            optional=len(optional),
            depth=self.program.depth,
            run_ahead=self.program.launch_limit if self.streams else 0,
            retire=(self.device if self.streams else self.host)[RETIRE],
            queues={node: tuple(numbers) for node, numbers in turns.items()},
            device_of={self.host[task]: node for task, node in self.device.items()},
            returns=self.returns,
            load=self._load(),
            users=self._users(),
        )

    def _launch_orders(self) -> tuple[list[list[int]], list[list[int]]]:
        """Device nodes in the order of the period: of what has this order, and of the queues."""
        users: dict[Row | str, list[Instruction]] = defaultdict(list)
        for ins, cost, row in zip(self.instructions, self.costs, self.stream_rows, strict=True):
            if ins.task in self.device:
                users[row].append(ins)
                for resource in cost.resources if cost.device_us else ():
                    users[resource].append(ins)
        orders: tuple[list[list[int]], list[list[int]]] = ([], [])
        for key, found in users.items():
            is_stream = isinstance(key, Row)
            if is_stream or len({ins.stream for ins in found}) > 1:
                fixed = len({i.lane for i in found}) == 1 or (is_stream and found[0].stream)
                orders[0 if fixed else 1].append([self.device[ins.task] for ins in found])
        return orders

    # ------------------------------------------------------------------ nodes

    def _nodes(self) -> list[Node]:
        before = {
            ins.task: self._passed(previous)
            for lane in self.program.lanes
            for previous, ins in pairwise((lane.instructions[-1], *lane.instructions))
        }
        shared = self._requested()
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
        returns = [nodes[k]._replace(time=0, lock=0, resources=()) for k in self.returns]
        return nodes + device + returns

    def _passed(self, ins: Instruction) -> int:
        """The node after which a thread is past an instruction."""
        here = self.host[ins.task]
        return self.returns.get(here, here)

    def _requested(self) -> set[str]:
        """Resources that host work uses, and work on another row."""
        users: dict[str, set[Row]] = defaultdict(set)
        by_hosts: set[str] = set()
        for cost, row, stream_row in zip(self.costs, self.rows, self.stream_rows, strict=True):
            on_device = self.streams and cost.device_us > 0
            for resource in cost.resources:
                users[resource].add(stream_row if on_device else row)
            by_hosts.update(() if on_device else cost.resources)
        return {resource for resource in by_hosts if len(users[resource]) > 1}

    # ------------------------------------------------------------------- arcs

    def _fixed(self, nodes: Sequence[Node], chains: Iterable[Sequence[int]]) -> Iterable[Arc]:
        for ins in self.instructions:
            here = self.host[ins.task]
            previous = nodes[here].previous
            yield Arc(previous, here, nodes[previous].time, int(ins.position == 0))
            for wait in ins.host_waits:
                # The wait is for the instruction at this position of the other thread.
                lane = self.program.lanes[wait.lane]
                passed = self._passed(lane.instructions[wait.position])
                yield Arc(passed, here, nodes[passed].time + self.handover, wait.lag)
            if ins.task in self.device:
                yield Arc(here, self.device[ins.task], nodes[here].time, 0)
            if here in self.returns:
                yield Arc(here, self.returns[here], nodes[here].time, 0)
        for chain in chains:
            for a, b in pairwise(chain):
                yield Arc(a, b, nodes[a].time, 0)
            yield Arc(chain[-1], chain[0], nodes[chain[-1]].time, 1)

    def _optional(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        """Event waits, blocking and back-pressure, which are those of iterations."""
        if not self.streams:
            return
        for here, back in self.returns.items():
            device = self.device[nodes[here].task]
            yield Arc(device, back, nodes[device].time, 0)
        stage = {ins.task: ins.stage for ins in self.instructions}
        for ins in self.instructions:
            for wait in ins.event_waits:
                if wait.producer in self.device:  # the batch itself is assumed to be on the host
                    tail, head = self.device[wait.producer], self.device[ins.task]
                    lag = stage[ins.task] - stage[wait.producer] + wait.distance
                    yield Arc(tail, head, nodes[tail].time, lag)
        if (limit := self.program.launch_limit) is not None:
            done = self.device[RETIRE]
            yield Arc(done, self.host[ADMIT], nodes[done].time + self.handover, 1 + limit)

    # ------------------------------------------------------------------- load

    def _load(self) -> dict[Row | str, int]:
        load: dict[Row | str, int] = defaultdict(int)
        for cost, time, row, stream_row in zip(
            self.costs, self.times, self.rows, self.stream_rows, strict=True
        ):
            load[row] += max(time, thread_time(cost, self.streams))
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


def _launches(ins: Instruction, cost: TaskCost) -> bool:
    """Whether an instruction gives work, a wait or an event to its stream, or waits for that."""
    waits = any(wait.producer not in SOURCES for wait in ins.event_waits)
    own = ins.task in SOURCES
    works = cost.device_us > 0 or cost.blocks
    return ins.task == RETIRE or works or (not own and (waits or ins.record))
