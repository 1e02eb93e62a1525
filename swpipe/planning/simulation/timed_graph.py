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
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PULL
from swpipe.planning.simulation.cycles import Arc, ticks
from swpipe.program import ADMIT, RETIRE, SOURCES, Instruction, Program
from swpipe.trace.span import Row

LOCK = "interpreter lock"
"""The name of the interpreter lock among the resources."""

Use: TypeAlias = tuple[Literal["thread", "stream", "resource", "lock"], str]
"""The kind and the name of what a task uses: a ``Row``, a resource or the interpreter lock."""

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
        fixed: Constraints between nodes; their ``distance`` is a lag in periods.
        optional: Further constraints, which apply only if both iterations exist.
        steady: Further arcs that hold in the steady state. A run has ``queues`` instead, because at
            its begin and end some iterations do not exist and take no turn.
        depth: The depth of the program.
        run_ahead: How many iterations that were handed out the device may not have finished yet;
            None for any number.
        retire: The node that ends an iteration.
        queues: For each device node, the numbers of the queues in which it waits, in the order of
            launch.
        contended: Whether a resource is granted in no fixed order, so that arcs do not fix all
            times.
        device_of: The device node of each host node.
        returns: For the host node of each task that blocks, the node of its return.
        load: For each row, resource and lock, the tasks that use it, each with its ticks per
            iteration. Several workers share a row here, which has the load of one of them.
        threads: For each row of host work, the rows of its workers.
    """

    nodes: tuple[Node, ...]
    fixed: tuple[Arc, ...]
    optional: tuple[Arc, ...]
    steady: tuple[Arc, ...]
    depth: int
    run_ahead: int | None
    retire: int
    queues: Mapping[int, tuple[int, ...]]
    contended: bool
    device_of: Mapping[int, int]
    returns: Mapping[int, int]
    load: Mapping[Use, Mapping[str, int]]
    threads: Mapping[Row, Sequence[Row]]

    @property
    def arcs(self) -> tuple[Arc, ...]:
        """The arcs of a run: the fixed ones, then the optional ones."""
        return (*self.fixed, *self.optional)

    @property
    def in_flight(self) -> int:
        """The largest number of iterations that have begun and that the device has not finished."""
        return self.depth + (self.run_ahead or 0)

    @property
    def sampled(self) -> int:
        """The number of sampled iterations; 0 if each task always takes the same time."""
        return max(len(node.each) for node in self.nodes)

    def busiest(self) -> tuple[Use, int]:
        """Return the row or resource that is busy longest per iteration, and its ticks."""
        loads = ((use, sum(tasks.values())) for use, tasks in self.load.items())
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
        return replace(self, optional=(*self.optional, arc), run_ahead=far)


def timed_graph(
    program: Program, costs: CostModel, *, least: int = 0, sampled: bool = False
) -> TimedGraph:
    """Return the graph of a program, in which every instruction takes at least ``least`` ticks.

    With ``sampled`` its nodes have the times of the sampled iterations, besides their means.
    """
    return _Builder(program, costs, least, sampled).build()


def rings(nodes: Sequence[Node], lines: Iterable[Sequence[int]]) -> Iterable[Arc]:
    """Yield arcs from each node of a line to the next, and from its last to the next period."""
    for works in lines:
        for work, following in zip(works, (*works[1:], works[0]), strict=True):
            yield Arc(work, following, nodes[work].time, int(following == works[0]))


class _Work(NamedTuple):
    """An instruction, its cost, and its nodes.

    Attributes:
        host: The node of its host work.
        device: The node of its device work; None if it gives its stream nothing to do.
        thread: The row of its thread group.
        stream: The row of its stream.
        has_stream: Whether its device work runs on the stream; if not, it runs on the thread.
    """

    ins: Instruction
    cost: TaskCost
    host: int
    device: int | None
    thread: Row
    stream: Row
    has_stream: bool

    @property
    def holder(self) -> Row:
        """The row that holds the resources: the stream, if there is device work on it."""
        return self.stream if self.has_stream and self.cost.device_us > 0 else self.thread

    @property
    def time(self) -> int:
        """The ticks on the thread until the device work is launched, or done without a stream."""
        return _host_time(self.cost, self.has_stream)


class _Line(NamedTuple):
    """Device work that runs one at a time, in the order of launch.

    Attributes:
        nodes: Device nodes in the order of the period.
        is_stream: Whether the line is a stream, which keeps the order by itself.
        is_programs: Whether the order of launch is that of the period.
    """

    nodes: Sequence[int]
    is_stream: bool
    is_programs: bool


class _Builder:
    def __init__(self, program: Program, costs: CostModel, least: int, sampled: bool) -> None:
        self.program = program
        self.least = least
        self.samples = costs.iterations if sampled else 0
        self.handover = ticks(costs.handover_us)
        # Tasks without a cost were refused by ``of``; swpipe's own instructions cost nothing.
        known = costs.of(program.tasks)
        instructions = program.instructions
        # Without a group that pulls, ``<admit>`` pulls the batch and has its cost.
        known[PULL if PULL in instructions else ADMIT] = costs.tasks.get(PULL, TaskCost())
        # Nodes are numbered: host work in program order, then device work, then returns.
        numbers = count(len(program.order))
        self.works: dict[str, _Work] = {}
        for host, name in enumerate(program.order):
            ins = instructions[name]
            cost = known.get(name, TaskCost())
            has_stream = program.streams and not ins.on_host
            self.works[name] = _Work(
                ins,
                cost,
                host,
                next(numbers) if has_stream and _launches(ins, cost) else None,
                Row("thread", program.lanes[ins.lane].group),
                Row("stream", stream_name(ins.stream)),
                has_stream,
            )
        self.returns = {
            work.host: next(numbers)
            for work in self.works.values()
            if work.has_stream and work.cost.blocks
        }
        self.threads = {
            Row("thread", lane.group): [Row("thread", name) for name in lane.threads]
            for lane in program.lanes
        }

    def build(self) -> TimedGraph:
        nodes = self._nodes()
        lines = list(self._lines())
        # A line with the program's order on one stream needs only arcs. All other lines are queues
        # in a run.
        streams = [line for line in lines if line.is_stream and line.is_programs]
        queues = [line for line in lines if line not in streams]
        load: dict[Use, dict[str, int]] = defaultdict(dict)
        for use, task, time in self._uses():
            load[use][task] = time
        turns: dict[int, list[int]] = defaultdict(list)
        for number, queue in enumerate(queues):
            for node in queue.nodes:
                turns[node].append(number)
        devices = {w.host: w.device for w in self.works.values() if w.device is not None}
        retire = self.works[RETIRE].host
        return TimedGraph(
            nodes=tuple(nodes),
            fixed=(*self._fixed(nodes), *rings(nodes, [line.nodes for line in streams])),
            optional=tuple(self._optional(nodes)),
            steady=tuple(rings(nodes, [queue.nodes for queue in queues if queue.is_programs])),
            depth=self.program.depth,
            run_ahead=self.program.launch_limit if self.program.streams else 0,
            retire=devices.get(retire, retire),
            queues={node: tuple(numbers) for node, numbers in turns.items()},
            # A queue with the program's order has fixed times in the steady state, and is not
            # contended.
            contended=not all(queue.is_programs for queue in queues)
            or any(node.lock or node.resources for node in nodes),
            device_of=devices,
            returns=self.returns,
            load=load,
            threads=self.threads,
        )

    def _lines(self) -> Iterable[_Line]:
        """Yield the work of each stream, and of each resource that work on several streams uses."""
        users: dict[Row | str, dict[int, Instruction]] = defaultdict(dict)
        for work in self.works.values():
            if work.device is not None:
                users[work.stream][work.device] = work.ins
                for resource in work.cost.resources if work.holder is work.stream else ():
                    users[resource][work.device] = work.ins
        # A stream is always a line of its own. A resource is one only if it joins several streams:
        # on one stream, the stream's order implies its own.
        for key, launched in users.items():
            is_stream = isinstance(key, Row)
            streams = {ins.stream for ins in launched.values()}
            if is_stream or len(streams) > 1:
                # A stream with a name gets its work in the program's order, from whatever thread.
                named = is_stream and streams != {None}
                lanes = {ins.lane for ins in launched.values()}
                yield _Line([*launched], is_stream, named or len(lanes) == 1)

    # ------------------------------------------------------------------ nodes

    def _nodes(self) -> list[Node]:
        works = self.works.values()
        requested = self._requested()
        nodes = []
        device = []
        for work in works:
            ins = work.ins
            cost = work.cost
            each = [*cost.each(self.samples)] if self.samples else []
            held = tuple(name for name in cost.resources if name in requested)
            on_thread = work.holder is work.thread
            nodes.append(
                Node(
                    ins.task,
                    ins.stage,
                    work.thread,
                    max(self.least, work.time),
                    ticks(cost.gil_us) if LOCK in requested else 0,
                    held if on_thread else (),
                    # The node before a lane's first instruction is its last one.
                    self._passed(ins.lane, ins.position - 1),
                    # It ran in the period before; with n workers, n periods before.
                    0 if ins.position else len(self.threads[work.thread]),
                    tuple(max(self.least, _host_time(sample, work.has_stream)) for sample in each),
                )
            )
            if work.device is not None:
                device.append(
                    Node(
                        ins.task,
                        ins.stage,
                        work.stream,
                        ticks(cost.device_us),
                        resources=() if on_thread else held,
                        each=tuple(ticks(sample.device_us) for sample in each),
                    )
                )
        returns = [nodes[k]._replace(time=0, lock=0, resources=(), each=()) for k in self.returns]
        return nodes + device + returns

    def _passed(self, lane: int, position: int) -> int:
        """Return the node after which a thread has passed an instruction of its lane."""
        host = self.works[self.program.lanes[lane].instructions[position].task].host
        return self.returns.get(host, host)

    def _requested(self) -> set[str]:
        """Return the resources that host work uses together with work on another row.

        The interpreter lock is one of them if several groups, or workers of one group, hold it.
        """
        users: dict[str, set[Row]] = defaultdict(set)
        by_hosts: set[str] = set()
        for work in self.works.values():
            for resource in work.cost.resources:
                users[resource].update(self.threads.get(work.holder, [work.holder]))
                if work.holder is work.thread:
                    by_hosts.add(resource)
            if work.cost.gil_us:
                users[LOCK].update(self.threads[work.thread])
                by_hosts.add(LOCK)
        return {resource for resource in by_hosts if len(users[resource]) > 1}

    # ------------------------------------------------------------------- arcs

    def _fixed(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        for work in self.works.values():
            node = nodes[work.host]
            yield Arc(node.previous, work.host, nodes[node.previous].time, node.back)
            for wait in work.ins.host_waits:
                # The wait ends when the other thread has passed the instruction at this position,
                # and this thread wakes ``handover`` later.
                passed = self._passed(wait.lane, wait.position)
                yield Arc(passed, work.host, nodes[passed].time + self.handover, wait.lag)
            if work.device is not None:
                yield Arc(work.host, work.device, node.time, 0)
            if work.host in self.returns:
                yield Arc(work.host, self.returns[work.host], node.time, 0)

    def _optional(self, nodes: Sequence[Node]) -> Iterable[Arc]:
        """Yield the arcs of event waits, blocking and back-pressure, which bind iterations."""
        device = {name: work.device for name, work in self.works.items() if work.device is not None}
        # A task that blocks returns when its device work is done.
        for host, back in self.returns.items():
            work = device[nodes[host].task]
            yield Arc(work, back, nodes[work].time, 0)
        for head in self.works.values():
            for wait in head.ins.event_waits:
                # The batch is assumed to be on the host: no event for it.
                if wait.producer in device:
                    tail = device[wait.producer]
                    lag = head.ins.stage - nodes[tail].stage + wait.distance
                    yield Arc(tail, device[head.ins.task], nodes[tail].time, lag)
        # Back-pressure: ``<admit>`` waits until the device has passed ``<retire>`` of an earlier
        # iteration. ``<retire>`` has stage depth - 1, so the lag in periods is 1 + limit.
        limit = self.program.launch_limit
        if RETIRE in device and limit is not None:
            done = device[RETIRE]
            admit = self.works[ADMIT].host
            yield Arc(done, admit, nodes[done].time + self.handover, 1 + limit)

    # ------------------------------------------------------------------- load

    def _uses(self) -> Iterable[tuple[Use, str, int]]:
        """Yield each resource that a task uses, with the task and its ticks."""
        for task, work in self.works.items():
            cost = work.cost
            # A task that blocks occupies its thread until its device work is done.
            busy = _host_time(cost, work.has_stream and not cost.blocks)
            # Of n workers each runs the task every n iterations; the quotient is rounded up.
            busy = max(self.least, busy)
            yield work.thread, task, -(-busy // len(self.threads[work.thread]))
            if work.has_stream:
                yield work.stream, task, ticks(cost.device_us)
            for resource in cost.resources:
                held_us = cost.total_us if work.holder is work.thread else cost.device_us
                yield ("resource", resource), task, ticks(held_us)
            if cost.gil_us:
                yield ("lock", LOCK), task, ticks(cost.gil_us)


def _host_time(cost: TaskCost, has_stream: bool) -> int:
    """Return the ticks of a task on its thread: with a stream, until its work is launched."""
    return ticks(cost.host_us) + (0 if has_stream else ticks(cost.device_us))


def _launches(ins: Instruction, cost: TaskCost) -> bool:
    """Return whether an instruction gives its stream work, a wait or an event, or waits for it."""
    waits = any(wait.producer not in SOURCES for wait in ins.event_waits)
    own = ins.task in SOURCES
    works = cost.device_us > 0 or cost.blocks
    return ins.task == RETIRE or works or (not own and (waits or ins.record))
