r"""Which task comes before which in every interleaving of a compiled program.

    default   <admit> . a . b . <retire> | <admit> . a . b ...      each lane knows what it ran,
                 \         ^                                        and at a host wait (1) learns
    io            `(1) c --(1)                                      what the other lane knew there
                       |
    device             c . . . (2) event . . > b                    a stream knows what it was given
                                                                    and at an event wait (2) learns
                                                                    what stood before the event

Program order, host waits, stream order, event waits and back-pressure order, and nothing else.
``HappensBefore`` walks the program once, period by period, in one order that its waits allow, and
notes at each instruction what is known to lie before it (vector clocks, with a bit for each run of
a task; Fidge 1988, Mattern 1989). The result does not depend on the order that is walked.

Of a group of several workers each is a thread of its own, which runs every so many periods.

Two relations:

- *host*: the first task's function has returned before the other one's is called. Lanes pass their
  instructions and do their host waits in every period, whether the iteration exists or not.
- *device*: the first task's device work is done before the other one's starts. Known of what one
  stream was given by instructions in host order; through events, where both iterations exist; and
  through ``<admit>``, which waits for the device work of the iteration ``depth + launch_limit``
  before. What a loader has the device do is on the caller's stream. The work of a task of the host
  alone is its function: no event comes before it, and it is done when that returns.

**Any number of iterations.** "A on iteration i comes before B on iteration i + d" must hold for
every i in a run of any length. It does exactly if it holds in the run of ``abs(d) + 1`` iterations
that has the two and those between: every step of a proof in that run has its like in a longer one,
and that run is one of those asked for. So each distance has a walk of its own. The pull that finds
the end of the data waits for the device too, but a drained run ends without it: nothing relies on
that.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

from swpipe._engine.program import (
    ADMIT,
    BEGIN,
    RETIRE,
    SOURCES,
    Instruction,
    Program,
    compile_plan,
)
from swpipe.core.dependence import topological
from swpipe.core.plan import BODY, PULL, PipelinePlan, StreamRef
from swpipe.core.resolved import ResolvedPlan


class _Known(NamedTuple):
    """What a lane knows, as sets of runs: bit n is set where run n is known to lie before.

    Attributes:
        host: Functions that have returned, events recorded.
        done: Device work that is done, whichever stream it was on.
        ahead: Stream to the device work that stands before whatever this lane gives it next.
    """

    host: int
    done: int
    ahead: dict[StreamRef, int]


class _Walk:
    """One walk through a program's run of so many iterations.

    Attributes:
        host_before: (task, iteration) to the runs whose functions return before it is called.
        device_before: (task, iteration) to the runs whose device work is done before its own
            starts.
        bits: Task to the set of its run on the first iteration alone; the next iteration's is one
            bit further.
    """

    def __init__(self, program: Program, order: tuple[Instruction, ...], iterations: int) -> None:
        self.host_before: dict[tuple[str, int], int] = {}
        self.device_before: dict[tuple[str, int], int] = {}
        self._program = program
        self._iterations = iterations
        self.bits = {ins.task: 1 << n * iterations for n, ins in enumerate(order)}
        lanes = [[_Known(0, 0, {})] * lane.workers for lane in program.lanes]
        passed: dict[tuple[str, int], _Known] = {}
        for period in range(iterations + program.depth - 1):
            for ins in order:
                workers = lanes[ins.lane]
                turn = (period - ins.stage) % len(workers)
                known = workers[turn]
                for wait in ins.host_waits:
                    if period >= wait.lag:
                        told, streams = passed[wait.producer, period - wait.lag], known.ahead
                        known = _Known(
                            known.host | told.host,
                            known.done | told.done,
                            {
                                s: streams.get(s, 0) | told.ahead.get(s, 0)
                                for s in streams | told.ahead
                            },
                        )
                if 0 <= period - ins.stage < iterations:
                    known = self._run(ins, period - ins.stage, known)
                workers[turn] = passed[ins.task, period] = known

    def _run(self, ins: Instruction, i: int, known: _Known) -> _Known:
        """What the lane knows after the instruction's turn on iteration i."""
        host, done, ahead = known
        self.host_before[ins.task, i] = host
        own = self.bits[ins.task] << i  # the set of this run alone
        host |= own
        limit = self._program.launch_limit
        if ins.task == ADMIT and limit is not None and i >= self._program.depth + limit:
            done |= self._through(RETIRE, i - self._program.depth - limit)
        if ins.on_host:
            self.device_before[ins.task, i] = done
            return _Known(host, done | own, ahead)
        before = ahead.get(ins.stream, 0) | done
        if ins.task in (*SOURCES, BEGIN):
            self.device_before[ins.task, i] = before
            return _Known(host, done, ahead)
        for wait in ins.event_waits:
            j = i - wait.distance
            exists = wait.producer not in SOURCES and 0 <= j < self._iterations
            # An event is worth something only if it has been recorded for sure.
            if exists and host & self.bits[wait.producer] << j:
                before |= self._through(wait.producer, j)
        self.device_before[ins.task, i] = before
        return _Known(host, done, {**ahead, ins.stream: before | own})

    def _through(self, task: str, i: int) -> int:
        """What stands before the event of this run: the run, and what is before it."""
        return self.device_before[task, i] | self.bits[task] << i


class HappensBefore:
    """The order that a program keeps in every interleaving.

    Args:
        program: A compiled plan.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.streams = program, program.streams
        self._on_host = {name for name, ins in program.instructions.items() if ins.on_host}
        self._walks: dict[int, _Walk] = {}
        self._answers: dict[tuple[str, str, int, bool], bool] = {}
        # Without a thread group that pulls, ``<admit>`` calls the loader. No other lane waits for
        # ``<retire>``: whatever comes after it comes after the body, too.
        self._stands_for = {BODY: RETIRE, PULL: PULL if PULL in program.order else ADMIT}

    @property
    def plan(self) -> PipelinePlan:
        """The plan that was compiled."""
        return self.program.resolved.plan

    @classmethod
    def of(cls, resolved: ResolvedPlan, *, streams: bool) -> Self:
        """The order that a validated plan keeps on a device with streams, or on one without."""
        return cls(compile_plan(resolved, streams=streams))

    def keeps(self, first: str, then: str, distance: int, *, attribute: bool = False) -> bool:
        """Whether this order is kept on the host and, with streams, on the device.

        ``<pull>`` is the call of the loader, on whatever thread it is. ``<body>`` is what the
        caller does after ``<retire>``, before it comes to the next instruction. Of an
        ``attribute`` a task of the host alone uses no result of device work.
        """
        if not self.host(first, then, distance):
            return False
        host_only = not self.streams or (attribute and then in self._on_host)
        return host_only or self.device(first, then, distance)

    def host(self, first: str, then: str, distance: int) -> bool:
        """Whether ``first`` on iteration i has returned before ``then`` on i + distance is called.

        Args:
            first: A task, or ``<admit>``, ``<pull>`` or ``<retire>``.
            then: Another, or the same.
            distance: Iterations from the first to the other; may be negative.

        Returns:
            True if it holds for every i, however many iterations there are.
        """
        known = self._answers.get((first, then, distance, False))
        return self._ask(first, then, distance, on_device=False) if known is None else known

    def never_beside(self, one: str, other: str, distance: int) -> bool:
        """Whether two never run at the same time, ``distance`` or more iterations apart."""
        return all(
            self.host(one, other, apart) or self.host(other, one, -apart)
            for apart in range(distance, distance + self.program.depth)
        )

    def device(self, first: str, then: str, distance: int) -> bool:
        """The same of their device work, on a device with streams.

        ``<admit>`` and ``<pull>`` have none that others wait for: what they do is done when they
        return. What they make of device work comes after what is before them on the caller's
        stream.
        """
        if first in SOURCES:
            return self.host(first, then, distance)
        known = self._answers.get((first, then, distance, True))
        return self._ask(first, then, distance, on_device=True) if known is None else known

    @cached_property
    def _order(self) -> tuple[Instruction, ...]:
        """One order of a period's instructions in which all their waits point backwards."""
        by_task = self.program.instructions
        edges = []
        for lane in self.program.lanes:
            edges += [(after.task, before.task) for before, after in pairwise(lane.instructions)]
            for ins in lane.instructions:
                edges += [(ins.task, wait.producer) for wait in ins.host_waits if wait.lag == 0]
        return tuple([by_task[task] for task in topological(dict.fromkeys(by_task, ()), edges)])

    def _ask(self, first: str, then: str, distance: int, *, on_device: bool) -> bool:
        """Ask the walk that answers for this distance, and remember what it says."""
        iterations = abs(distance) + 1
        if iterations not in self._walks:
            self._walks[iterations] = _Walk(self.program, self._order, iterations)
        walk, i = self._walks[iterations], max(0, -distance)
        one, other = (self._stands_for.get(name, name) for name in (first, then))
        before = walk.device_before if on_device else walk.host_before
        found = bool(before[other, i + distance] & walk.bits[one] << i)
        self._answers[first, then, distance, on_device] = found
        return found
