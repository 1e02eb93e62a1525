r"""One period of a loop, played in the order of a plan: how soon can the next one follow?

Tasks start one after the other in the order of the period, each as soon as it may::

    caller's thread  <admit> [f][b]......[step] <retire>       threads, streams and resources are
    a worker         [read .......][copy]                      *rows*: one operation at a time
    stream "copies"                    [copy ....]

A dependence of lag 0 holds a task back; one of lag 1 or more binds a later period. So the interval
is, at least roughly, the greatest of

- every row's time from its first start to its last end,
- what a dependence of lag k leaves between its two ends, over k,
- <admit> and <retire>: both are the caller's, and an iteration is ``depth`` periods between them.

It is a promise, and not proof: rows may shift against each other and do better, and what several
threads ask for at once is had by who comes first, whatever the order of the plan. The simulator has
the last word; but this costs a few microseconds for each task, and a tenth of one where compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from swpipe.planning.modulo.compiled import Real, Whole, compiled, real, reals, whole, wholes
from swpipe.planning.modulo.loop_graph import CALLERS_STREAM, Edge, HoldKind, LoopGraph

_SPREAD = 0.1
"""Of two plans with one interval that with the shorter rows is nearer to a better one."""


RESOURCE, LOCK, BOTH = 1, 2, 3
"""What is had by who comes first: resources are, and then the interpreter lock."""


class Loop(NamedTuple):
    """A loop in numbers. Operation v is the host work of task v, ``size + v`` its device work.

    What belongs to operation v in ``into_...`` and ``hold_...`` stands from ``..._of[v]`` up to,
    not including, ``..._of[v + 1]``.

    Attributes:
        size: Tasks.
        operations: As many, or with streams twice as many.
        threads: At most; their numbers are those of the first rows.
        depth: Iterations in flight.
        rows: Threads, streams and resources.
        streams: As many as there are, the caller's counted; 0 where the device has none.
        callers_row: That of the caller's stream; -1 for none.
        handover_us: What a wait for another thread costs.
        busiest_us: What each iteration takes of the busiest row that is not a thread.
        host_us: Task to time on its thread.
        device_us: Task to time on its stream.
        stream: Task to the number of its stream; 0 is the caller's.
        into_of: Where the edges into an operation stand.
        into_tail: Their tails.
        into_head: Their heads.
        into_us: From the tail's start to the head's, at least.
        into_distance: Iterations from the tail to the head.
        into_over_us: On top where the two are on different threads.
        hold_of: Where the rows that an operation takes stand.
        hold_row: The row; -1 for that of the task's thread.
        hold_us: How long it is taken.
        hold_first_come: RESOURCE or LOCK where who comes first has the row, whatever the order of
            the plan; else 0.
        contends: Operation to what it holds of these: one, BOTH or 0.
        hold_turn: 1 where it is a matter of turns on the host, in the order of the plan.
    """

    size: int
    operations: int
    threads: int
    depth: int
    rows: int
    streams: int
    callers_row: int
    handover_us: float
    busiest_us: float
    host_us: Real
    device_us: Real
    stream: Whole
    into_of: Whole
    into_tail: Whole
    into_head: Whole
    into_us: Real
    into_distance: Whole
    into_over_us: Real
    hold_of: Whole
    hold_row: Whole
    hold_us: Real
    hold_first_come: Whole
    contends: Whole
    hold_turn: Whole


class Arrangement(NamedTuple):
    """A plan in numbers.

    Attributes:
        order: The tasks, those of lag 0 in the order of their dependences.
        lanes: Task to its thread.
        stages: Task to its stage.
    """

    order: Whole
    lanes: Whole
    stages: Whole


class Played(NamedTuple):
    """What the period played last left behind, if it was played to its end.

    Attributes:
        free: Row to when it is free again.
        first: Row to when it was first taken; -1 for never.
        last: Row to the operation that took it last; -1 for none.
        at: Operation to its start.
        cause: Operation to the one that it waited for last; -1 for none.
        later: Edges of lag 1 and more.
        late: Task to how long after the end of its period it is done.
    """

    free: Real
    first: Real
    last: Whole
    at: Real
    cause: Whole
    later: Whole
    late: Real


@compiled
def highest(values: Whole) -> int:
    """The greatest of an array."""
    most = values[0]
    for value in values:
        most = max(most, value)
    return most


@compiled
def play(  # noqa: C901 - one loop, played millions of times
    loop: Loop, place: Arrangement, played: Played, limit_us: float
) -> tuple[float, float, int]:
    """Play one period: what it costs, its interval, the operation that sets it.

    It costs its interval, and a little for what its rows leave idle; infinity where it was left
    unplayed, since it costs more than ``limit_us``.
    """
    size, handover_us = loop.size, loop.handover_us
    lanes, stages = place.lanes, place.stages
    into_of, into_tail, into_us = loop.into_of, loop.into_tail, loop.into_us
    into_distance, into_over_us = loop.into_distance, loop.into_over_us
    hold_of, hold_row, hold_us = loop.hold_of, loop.hold_row, loop.hold_us
    free, first, last, at, cause, later, _ = played
    for row in range(loop.rows):
        free[row], first[row], last[row] = 0.0, -1.0, -1
    first[0] = 0.0  # the caller's thread begins with <retire> of the period before
    admit = 0.0 if loop.operations == size else -1.0
    new = highest(stages) - loop.depth + 1  # an iteration ends with its last task, and not later
    laters = 0
    for task in place.order:
        lane, stage = lanes[task], stages[task]
        start = 0.0
        if stage == new:
            if admit < 0:
                admit = free[0]
            start = admit + handover_us if lane else admit
        for operation in range(task, loop.operations, size):
            because = -1
            for edge in range(into_of[operation], into_of[operation + 1]):
                tail = into_tail[edge]
                producer = tail - size if tail >= size else tail
                lag = stage - stages[producer] + into_distance[edge]
                if lag:
                    later[laters] = edge
                    laters += 1
                else:
                    after = at[tail] + into_us[edge]
                    if lanes[producer] != lane:
                        after += into_over_us[edge]
                    if after > start:
                        start, because = after, tail
            for hold in range(hold_of[operation], hold_of[operation + 1]):
                row = hold_row[hold] if hold_row[hold] >= 0 else lane
                if free[row] > start:
                    start, because = free[row], last[row]
            at[operation], cause[operation] = start, because
            for hold in range(hold_of[operation], hold_of[operation + 1]):
                row = hold_row[hold] if hold_row[hold] >= 0 else lane
                free[row], last[row] = start + hold_us[hold], operation
                if first[row] < 0:
                    first[row] = start
                elif free[row] - first[row] > limit_us:
                    return math.inf, math.inf, -1
    return _cost(loop, place, played, admit if admit >= 0 else free[0], laters)


@compiled
def _cost(
    loop: Loop, place: Arrangement, played: Played, admit: float, laters: int
) -> tuple[float, float, int]:
    free, first, at = played.free, played.first, played.at
    size, lanes, stages = loop.size, place.lanes, place.stages
    us, limiting, spread = 0.0, played.last[0], 0.0
    for row in range(loop.rows):
        if first[row] >= 0:
            taken = free[row] - first[row]
            if row < loop.threads:
                spread += taken
            if taken > us:
                us, limiting = taken, played.last[row]
    for number in range(laters):
        edge = played.later[number]
        tail, head = loop.into_tail[edge], loop.into_head[edge]
        producer, consumer = tail % size, head % size
        after = at[tail] + loop.into_us[edge] - at[head]
        if lanes[producer] != lanes[consumer]:
            after += loop.into_over_us[edge]
        lag = stages[consumer] - stages[producer] + loop.into_distance[edge]
        if after > us * lag:
            us, limiting = after / lag, tail
    us = _framed(loop, place, played, admit, us)
    return us + _SPREAD * spread / loop.threads, us, limiting


@compiled
def _framed(  # noqa: C901 - as above
    loop: Loop, place: Arrangement, played: Played, admit: float, enough_us: float
) -> float:
    """What <admit> and <retire> ask for, where that is more than enough."""
    size, over, at, late = loop.size, loop.handover_us, played.at, played.late
    lanes, stages, device_us = place.lanes, place.stages, loop.device_us
    stage_last = highest(stages)
    new = stage_last - loop.depth + 1
    closed = played.free[0]
    for v in range(size):
        late[v] = at[v] + loop.host_us[v]
        if lanes[v]:
            late[v] += over
        if stages[v] == stage_last and late[v] > closed:
            closed = late[v]
    for v in range(size):
        late[v] -= closed
    us = max(enough_us, closed)
    if loop.operations > size:
        done = closed
        for v in range(size):
            queued = at[size + v] + device_us[v]
            if queued > done and (stages[v] == stage_last or not loop.stream[v]):
                done = queued
        for v in range(size):
            late[v] = max(late[v], at[size + v] + device_us[v] - done)
        us = max(us, done + over - admit)
        if loop.callers_row >= 0:  # <retire> is the last in the caller's stream
            us = max(us, done - played.first[loop.callers_row])
    for v in range(size):
        if stages[v] > new:
            us = max(us, (admit + over - at[v]) / (stages[v] - new))
        if stages[v] < stage_last:
            us = max(us, late[v] / (stage_last - stages[v]))
    return us


class Period:
    """Plays periods of one loop.

    Args:
        graph: The loop.
        threads: At most.
        depth: Iterations in flight.

    Attributes:
        us: The interval of the period played last.
        loop: The loop in numbers.
        left: What the period played last left behind.
    """

    def __init__(self, graph: LoopGraph, threads: int, depth: int) -> None:
        self.graph, self.threads, self.depth = graph, threads, depth
        self.us = math.inf
        self.loop = _numbers(graph, threads, depth)
        self.left = Played(
            free=reals(self.loop.rows),
            first=reals(self.loop.rows),
            last=wholes(self.loop.rows),
            at=reals(2 * graph.size),
            cause=wholes(2 * graph.size),
            later=wholes(len(graph.edges) + 1),
            late=reals(graph.size),
        )
        self._limiting = -1

    def play(
        self,
        order: Sequence[int],
        lanes: Sequence[int],
        stages: Sequence[int],
        limit_us: float = math.inf,
    ) -> float:
        """Play one period; what it costs: its interval, and a little for what its rows leave idle.

        Args:
            order: The tasks, those of lag 0 in the order of their dependences.
            lanes: Task to its thread.
            stages: Task to its stage.
            limit_us: A period that costs more may be left unplayed: it costs infinity.
        """
        place = Arrangement(whole(order), whole(lanes), whole(stages))
        cost, self.us, self._limiting = play(self.loop, place, self.left, limit_us)
        return cost

    def critical(self) -> list[int]:
        """The tasks that set the interval of the period played last, and what they waited for."""
        found = wholes(2 * self.graph.size)
        return list(found[: trace(self.loop, self.left, self._limiting, found)])


@compiled
def trace(loop: Loop, played: Played, limiting: int, found: Whole) -> int:
    """How many tasks set the interval; which, in ``found``: the last first."""
    operation, count = limiting, 0
    while operation >= 0:
        found[count] = operation % loop.size
        count += 1
        operation = played.cause[operation]
    if not count:
        for v in range(loop.size):
            found[v] = v
        count = loop.size
    return count


def _numbers(graph: LoopGraph, threads: int, depth: int) -> Loop:
    n = graph.size
    operations = 2 * n if graph.streams else n
    rows = {what: row for row, what in enumerate(graph.resources, threads)}
    into: list[list[Edge]] = [[] for _ in range(operations)]
    for edge in graph.edges:
        if edge.head < operations and (edge.tail % n != edge.head % n or edge.head >= n):
            into[edge.head].append(edge)
    edges = [edge for each in into for edge in each]
    kinds = list(enumerate(graph.kinds, threads))  # -1, the thread itself, is of none
    first_come = {row: RESOURCE for row, kind in kinds if kind is HoldKind.RESOURCE}
    first_come |= {row: LOCK for row, kind in kinds if kind is HoldKind.LOCK}
    turns = {row for row, kind in kinds if kind is HoldKind.TURN}
    holds = [
        ([(-1, graph.host_us[op])] if op < n else [])
        + [(threads + hold.what, hold.time_us) for hold in graph.holds[op]]
        for op in range(operations)
    ]
    taken = [hold for each in holds for hold in each]
    return Loop(
        size=n,
        operations=operations,
        threads=threads,
        depth=depth,
        rows=threads + len(rows),
        streams=max(graph.stream) + 1 if graph.streams else 0,
        callers_row=rows.get(CALLERS_STREAM, -1),
        handover_us=float(graph.handover_us),
        busiest_us=float(graph.busiest_us),
        host_us=real(graph.host_us),
        device_us=real(graph.device_us),
        stream=whole(graph.stream),
        into_of=begins(into),
        into_tail=whole(edge.tail for edge in edges),
        into_head=whole(edge.head for edge in edges),
        into_us=real(edge.time_us for edge in edges),
        into_distance=whole(edge.distance for edge in edges),
        into_over_us=real(graph.handover_us if edge.head < n else 0.0 for edge in edges),
        hold_of=begins(holds),
        hold_row=whole(row for row, _ in taken),
        hold_us=real(time_us for _, time_us in taken),
        hold_first_come=whole(first_come.get(row, 0) for row, _ in taken),
        contends=whole(sum({first_come.get(row, 0) for row, _ in each}) for each in holds),
        hold_turn=whole(int(row in turns) for row, _ in taken),
    )


def begins(of: Sequence[Sequence[object]]) -> Whole:
    """Where the entries of each begin, in a row of them all, and at last where it ends."""
    begins = [0]
    for each in of:
        begins.append(begins[-1] + len(each))
    return whole(begins)
