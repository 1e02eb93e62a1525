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

A stream runs its work in the order of launch, and so does a named resource that device work on
several streams uses, for example a communicator. If one thread launches all of the work, or if the
stream has a name, the order of launch is that of the program: arcs express it, too.

A resource is *contended* if it has no fixed order:

- a stream or a resource of device work, if several threads launch its work: the first launch wins;
- a named resource that is used by host work and by work on another row (a row is a thread or a
  stream), and the interpreter lock, if tasks of two or more thread groups hold it: the first
  request wins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PULL
from swpipe.planning.simulation.cycles import Arc, ticks
from swpipe.program import ADMIT, RETIRE, SOURCES, Instruction, Program
from swpipe.trace.span import Row

LOCK = "interpreter lock"
"""The name of the interpreter lock among the resources."""

_FAR = 4
"""The run-ahead, beyond the depth, that is assumed if the plan has no limit."""


class Node(NamedTuple):
    """The host or the device work of one instruction.

    Attributes:
        task: The instruction's task.
        stage: As in the program: in period p it works on iteration p - stage.
        row: The thread group or the stream.
        time: The mean duration in ticks.
        lock: The number of ticks, from the start, that need the interpreter lock; 0 if no other
            thread holds it.
        resources: The contended resources, which are held from start to end.
        previous: For host work, the node before it on its thread; for the thread's first, its last.
        back: How many periods earlier ``previous`` runs: 0; for the thread's first 1, or the number
            of workers of the group.
        each: The duration in each sampled iteration, repeated; () if it is always ``time``.
    """

    task: str
    stage: int
    row: Row
    time: int
    lock: int = 0
    resources: tuple[str, ...] = ()
    previous: int = -1
    back: int = 0
    each: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedGraph:
    """The nodes and arcs of a program.

    Attributes:
        nodes: Host work in the order of the program, then device work, then returns.
        arcs: Constraints between nodes; their ``distance`` is a lag in periods.
        optional: The number of arcs, at the end of ``arcs``, that apply only if both iterations
            exist.
        steady: Further arcs that hold in the steady state. A run has ``queues`` instead, because at
            its
            begin and end some iterations do not exist and take no turn.
        depth: The depth of the program.
        run_ahead: How many iterations that were handed out the device may not have finished yet;
            None
            for any number.
        retire: The node that ends an iteration.
        queues: For each device node, the numbers of the queues in which it waits, in the order of
            launch.
        contended: Whether a resource is granted in no fixed order, so that arcs do not fix all
            times.
        device_of: The device node of each host node.
        returns: For the host node of each task that blocks, the node of its return.
        load: For each row, resource and lock, the tasks that use it, each with its ticks per
            iteration.
            Several workers share a row here, which has the load of one of them.
        threads: For each row of host work, the rows of its workers.
    """

    nodes: tuple[Node, ...]
    arcs: tuple[Arc, ...]
    optional: int
    steady: tuple[Arc, ...]
    depth: int
    run_ahead: int | None
    retire: int
    queues: Mapping[int, tuple[int, ...]]
    contended: bool
    device_of: Mapping[int, int]
    returns: Mapping[int, int]
    load: Mapping[Row | str, Mapping[str, int]]
    threads: Mapping[Row, Sequence[Row]]

    @property
    def in_flight(self) -> int:
        """The largest number of iterations that have begun and that the device has not finished."""
        return self.depth + (self.run_ahead or 0)

    @property
    def sampled(self) -> int:
        """The number of sampled iterations; 0 if each task always takes the same time."""
        return max(len(node.each) for node in self.nodes)

    def busiest(self) -> tuple[Row | str, int]:
        """Return the row or resource that is busy longest per iteration, and its ticks."""
        loads = ((key, sum(uses.values())) for key, uses in self.load.items())
        return max(loads, key=lambda load: load[1])

    @property
    def reach(self) -> int:
        """The number of periods over which one execution can affect another directly."""
        return self.depth + max(arc.distance for arc in self.arcs) + 1

    def limited(self) -> TimedGraph:
        """Return the same graph, with a limit on how far the host gets ahead of the device.

        If the graph has no limit, one is added that does not change the interval: the device always
        has more work waiting than the threads are apart.
        """
        if self.run_ahead is not None:
            return self
        host = next(k for k, device in self.device_of.items() if device == self.retire)
        far = self.depth + _FAR
        arc = Arc(self.retire, host, self.nodes[self.retire].time, far)
        return replace(self, arcs=(*self.arcs, arc), optional=self.optional + 1, run_ahead=far)


def host_time(cost: TaskCost, streams: bool) -> int:
    """Return the ticks until a task's device work is launched.

    Without a stream, the thread does all the work, and its time counts too.
    """
    return ticks(cost.host_us) + (0 if streams else ticks(cost.device_us))


def thread_time(cost: TaskCost, streams: bool) -> int:
    """Return the least number of ticks on the thread, which may wait for the device work."""
    return host_time(cost, streams and not cost.blocks)


def timed_graph(
    program: Program, costs: CostModel, *, least: int = 0, sampled: bool = False
) -> TimedGraph:
    """Return the graph of a program, in which every instruction takes at least ``least`` ticks.

    With ``sampled`` its nodes have the times of the sampled iterations, besides their means.
    """
    return _Builder(program, costs, least, sampled).build()


class _Line(NamedTuple):
    """Device work that runs one at a time, in the order of launch.

    Attributes:
        works: Device nodes in the order of the period.
        on_one_stream: Whether all of it is on one stream, which keeps the order by itself.
        is_programs: Whether the order of launch is that of the period.
    """

    works: Sequence[int]
    on_one_stream: bool
    is_programs: bool


class _Builder:
    def __init__(self, program: Program, costs: CostModel, least: int, sampled: bool) -> None:
        self.program = program
        self.sampled = costs.iterations if sampled else 0
        self.streams = streams = program.streams
        self.handover = ticks(costs.handover_us)
        # Tasks without a cost were refused by ``of``; swpipe's own instructions cost nothing.
        known = costs.of(program.tasks)
        # Without a group that pulls, ``<admit>`` pulls the batch and has its cost.
        puller = PULL if PULL in program.instructions else ADMIT
        known[puller] = costs.tasks.get(PULL, TaskCost())
        found = program.instructions
        self.instructions = order = [found[name] for name in program.order]
        self.costs = [known.get(ins.task, TaskCost()) for ins in order]
        if not sampled:
            self.costs = [replace(one, host_each_us=(), device_each_us=()) for one in self.costs]
        self.least = least
        self.has_stream = [streams and not ins.on_host for ins in order]
        each = list(zip(order, self.costs, self.has_stream, strict=True))
        self.times = [max(least, host_time(cost, there)) for _, cost, there in each]
        self.host = {ins.task: k for k, ins in enumerate(order)}
        # Nodes are numbered: host work in program order, then device work, then returns.
        # Instructions that give their stream nothing to do have no device node.
        self.device: dict[str, int] = {}
        for ins, cost, there in each:
            if there and _launches(ins, cost):
                self.device[ins.task] = len(order) + len(self.device)
        blocking = [k for k, (_, cost, there) in enumerate(each) if there and cost.blocks]
        first = len(order) + len(self.device)
        self.returns = {k: first + number for number, k in enumerate(blocking)}
        threads = [Row("thread", lane.group) for lane in program.lanes]
        self.threads = {
            row: [Row("thread", name) for name in lane.threads]
            for row, lane in zip(threads, program.lanes, strict=True)
        }
        queues = {s: Row("stream", stream_name(s)) for s in {ins.stream for ins in order}}
        self.rows = [threads[ins.lane] for ins in order]
        self.stream_rows = [queues[ins.stream] for ins in order]
        self.on_device = [there and cost.device_us > 0 for _, cost, there in each]

    def build(self) -> TimedGraph:
        nodes = self._nodes()
        lines = list(self._lines())
        # A line with the program's order on one stream needs only arcs. All other lines are queues
        # in a run.
        streams = [line for line in lines if line.on_one_stream and line.is_programs]
        queues = [line for line in lines if line not in streams]
        optional = tuple(self._optional(nodes))
        load: dict[Row | str, dict[str, int]] = defaultdict(dict)
        for key, task, time in self._uses():
            load[key][task] = time
        turns: dict[int, list[int]] = defaultdict(list)
        for number, queue in enumerate(queues):
            for node in queue.works:
                turns[node].append(number)
        return TimedGraph(
            nodes=tuple(nodes),
            arcs=(*self._fixed(nodes), *_rings(nodes, streams), *optional),
            # Optional arcs come last in ``arcs``: the simulator tells them apart by their number.
            optional=len(optional),
            steady=tuple(_rings(nodes, [queue for queue in queues if queue.is_programs])),
            depth=self.program.depth,
            run_ahead=self.program.launch_limit if self.streams else 0,
            retire=(self.device if self.streams else self.host)[RETIRE],
            queues={node: tuple(numbers) for node, numbers in turns.items()},
            # A queue with the program's order has fixed times in the steady state, and is not
            # contended.
            contended=not all(queue.is_programs for queue in queues)
            or any(node.lock or node.resources for node in nodes),
            device_of={self.host[task]: node for task, node in self.device.items()},
            returns=self.returns,
            load=load,
            threads=self.threads,
        )

    def _lines(self) -> Iterable[_Line]:
        """Yield the work of each stream, and of each resource that work on several streams uses."""
        users: dict[Row | str, list[Instruction]] = defaultdict(list)
        for k, ins in enumerate(self.instructions):
            if ins.task in self.device:
                users[self.stream_rows[k]].append(ins)
                for resource in self.costs[k].resources if self.on_device[k] else ():
                    users[resource].append(ins)
        # A stream is always a line of its own. A resource is one only if it joins several streams:
        # on one stream, the stream's order implies its own.
        for key, found in users.items():
            on_one_stream = len({ins.stream for ins in found}) == 1
            if isinstance(key, Row) or not on_one_stream:
                named = on_one_stream and found[0].stream is not None
                yield _Line(
                    [self.device[ins.task] for ins in found],
                    on_one_stream,
                    named or len({ins.lane for ins in found}) == 1,
                )

    # ------------------------------------------------------------------ nodes

    def _nodes(self) -> list[Node]:
        before = {
            ins.task: self._passed(previous)
            for lane in self.program.lanes
            for previous, ins in pairwise((lane.instructions[-1], *lane.instructions))
        }
        # The lock counts only if two threads can hold it: several groups, or several workers of
        # one.
        shared = self._requested()
        holders = {r for r, cost in zip(self.rows, self.costs, strict=True) if cost.gil_us}
        lockers = [thread for row in holders for thread in self.threads[row]]
        nodes = []
        device = []
        for k, (ins, cost) in enumerate(zip(self.instructions, self.costs, strict=True)):
            held = tuple(r for r in cost.resources if r in shared) if shared else ()
            here, there = ((), held) if self.on_device[k] else (held, ())
            lock = ticks(cost.gil_us) if len(lockers) > 1 else 0
            previous = before[ins.task]
            # The first instruction follows the last one of the period before; with n workers, n
            # periods before.
            back = 0 if ins.position else len(self.threads[self.rows[k]])
            row = self.rows[k]
            stream_row = self.stream_rows[k]
            time = self.times[k]
            each = [*cost.each(self.sampled)]
            times = tuple(max(self.least, host_time(one, self.has_stream[k])) for one in each)
            nodes.append(Node(ins.task, ins.stage, row, time, lock, here, previous, back, times))
            if ins.task in self.device:
                time = ticks(cost.device_us)
                work = Node(ins.task, ins.stage, stream_row, time, 0, there)
                device.append(work._replace(each=tuple(ticks(one.device_us) for one in each)))
        returns = [nodes[k]._replace(time=0, lock=0, resources=(), each=()) for k in self.returns]
        return nodes + device + returns

    def _passed(self, ins: Instruction) -> int:
        """Return the node after which a thread has passed an instruction."""
        here = self.host[ins.task]
        return self.returns.get(here, here)

    def _requested(self) -> set[str]:
        """Return the resources that host work uses together with work on another row."""
        users: dict[str, set[Row]] = defaultdict(set)
        by_hosts: set[str] = set()
        for k, cost in enumerate(self.costs):
            for resource in cost.resources:
                users[resource].add((self.stream_rows if self.on_device[k] else self.rows)[k])
            by_hosts.update(() if self.on_device[k] else cost.resources)
        threads = {
            what: [t for r in rows for t in self.threads.get(r, [r])]
            for what, rows in users.items()
        }
        return {resource for resource in by_hosts if len(threads[resource]) > 1}

    # ------------------------------------------------------------------- arcs

    def _fixed(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        for ins in self.instructions:
            here = self.host[ins.task]
            previous = nodes[here].previous
            yield Arc(previous, here, nodes[previous].time, nodes[here].back)
            for wait in ins.host_waits:
                # The wait ends when the other thread has passed the instruction at this position,
                # and this thread wakes ``handover`` later.
                lane = self.program.lanes[wait.lane]
                passed = self._passed(lane.instructions[wait.position])
                yield Arc(passed, here, nodes[passed].time + self.handover, wait.lag)
            if ins.task in self.device:
                yield Arc(here, self.device[ins.task], nodes[here].time, 0)
            if here in self.returns:
                yield Arc(here, self.returns[here], nodes[here].time, 0)

    def _optional(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        """Yield the arcs of event waits, blocking and back-pressure, which bind iterations."""
        if not self.streams:
            return
        # A task that blocks returns when its device work is done.
        for here, back in self.returns.items():
            device = self.device[nodes[here].task]
            yield Arc(device, back, nodes[device].time, 0)
        stage = {ins.task: ins.stage for ins in self.instructions}
        for ins in self.instructions:
            for wait in ins.event_waits:
                # The batch is assumed to be on the host: no event for it.
                if wait.producer in self.device:
                    tail = self.device[wait.producer]
                    head = self.device[ins.task]
                    lag = stage[ins.task] - stage[wait.producer] + wait.distance
                    yield Arc(tail, head, nodes[tail].time, lag)
        # Back-pressure: ``<admit>`` waits until the device has passed ``<retire>`` of an earlier
        # iteration. ``<retire>`` has stage depth - 1, so the lag in periods is 1 + limit.
        if (limit := self.program.launch_limit) is not None:
            done = self.device[RETIRE]
            yield Arc(done, self.host[ADMIT], nodes[done].time + self.handover, 1 + limit)

    # ------------------------------------------------------------------- load

    def _uses(self) -> Iterable[tuple[Row | str, str, int]]:
        """Yield each resource that a task uses, with the task and its ticks."""
        for k, (ins, cost) in enumerate(zip(self.instructions, self.costs, strict=True)):
            has_stream = self.has_stream[k]
            row = self.rows[k]
            busy = max(self.times[k], thread_time(cost, has_stream))
            # Of n workers each runs the task every n iterations; the quotient is rounded up.
            yield row, ins.task, -(-busy // len(self.threads[row]))
            if has_stream:
                yield self.stream_rows[k], ins.task, ticks(cost.device_us)
            for resource in cost.resources:
                held = cost.device_us if self.on_device[k] else cost.total_us
                yield resource, ins.task, ticks(held)
            if cost.gil_us:
                yield LOCK, ins.task, ticks(cost.gil_us)


def _launches(ins: Instruction, cost: TaskCost) -> bool:
    """Return whether an instruction gives its stream work, a wait or an event, or waits for it."""
    waits = any(wait.producer not in SOURCES for wait in ins.event_waits)
    own = ins.task in SOURCES
    works = cost.device_us > 0 or cost.blocks
    return ins.task == RETIRE or works or (not own and (waits or ins.record))


def _rings(nodes: Sequence[Node], lines: Iterable[_Line]) -> Iterable[Arc]:
    """Yield arcs from each work to the next, and from the last to the first of the next period."""
    for line in lines:
        for a, b in pairwise(line.works):
            yield Arc(a, b, nodes[a].time, 0)
        last = line.works[-1]
        yield Arc(last, line.works[0], nodes[last].time, 1)
