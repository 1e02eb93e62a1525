r"""The tasks that come before others in every interleaving of a compiled program.

    default   <admit> . a . b . <retire> | <admit> . a . b ...      a lane knows what it has run;
                 \         ^                                        at a host wait (1) it learns
    io            `(1) c --(1)                                      what the other lane knew there
                       |
    device             c . . . (2) event . . > b                    a stream knows its work so far;
                                                                    at an event wait (2) it learns
                                                                    what stood before the event

Order comes from program order, host waits, stream order, event waits and back-pressure only.
``HappensBefore`` walks the program once, period by period, in one order that its waits allow, and
notes at each instruction which runs are known to come before it (vector clocks, with a bit for each
run of a task; Fidge 1988, Mattern 1989). The result does not depend on the order of the walk.

Each worker of a group counts as a thread of its own, which runs once in ``workers`` periods.

There are two relations:

- *host*: the first task's function has returned before the second one's is called. Lanes pass their
  instructions and do their host waits in every period, whether the iteration exists or not.
- *device*: the first task's device work is done before the other one's starts. This is known for
  work that instructions in host order give to one stream; through events, where both iterations
  exist; and through ``<admit>``, which waits for the device work of the iteration
  ``depth + launch_limit`` before. A loader's device work is on the caller's stream. The work of a
  task of the host alone is its function: it waits for no event, and is done when it returns.

**Any number of iterations.** "A on iteration i comes before B on iteration i + d" must hold for
every i in a run of any length. This is equivalent to the run of the ``abs(d) + 1`` iterations from
the one to the other: every step of a proof in that run has a counterpart in each longer run, and
that run is itself one of those asked for. So each distance has a walk of its own. The pull that
finds the end of the data waits for the device too, but a drained run ends without that pull:
nothing relies on it.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from swpipe.core.plan import BODY, PULL, PipelinePlan, StreamRef
from swpipe.core.resolved import ResolvedPlan
from swpipe.program import (
    ADMIT,
    BEGIN,
    RETIRE,
    SOURCES,
    Instruction,
    Program,
    compile_plan,
)


class _Known(NamedTuple):
    """The knowledge of a lane, as sets of runs: bit n is set if run n is known to come before.

    Attributes:
        host: Runs whose functions have returned and whose events are recorded.
        done: Runs whose device work is done, on any stream.
        ahead: Stream to the runs whose device work stands before whatever this lane gives it next.
    """

    host: int
    done: int
    ahead: dict[StreamRef, int]


class _Walk:
    """One walk through a program's run of a number of iterations.

    Attributes:
        host_before: (task, iteration) to the runs whose functions return before it is called.
        device_before: (task, iteration) to the runs whose device work is done before its own
            starts.
        bits: Task to the set of its run on the first iteration alone; shift it by one bit for each
            further iteration.
    """

    def __init__(self, program: Program, order: list[Instruction], iterations: int) -> None:
        self.host_before: dict[tuple[str, int], int] = {}
        self.device_before: dict[tuple[str, int], int] = {}
        self._program = program
        self._iterations = iterations
        self.bits = {ins.task: 1 << n * iterations for n, ins in enumerate(order)}
        # Knowledge of each worker of each lane, and of each instruction at each period.
        lanes = [[_Known(0, 0, {})] * lane.workers for lane in program.lanes]
        passed: dict[tuple[str, int], _Known] = {}
        for period in range(iterations + program.depth - 1):
            for ins in order:
                workers = lanes[ins.lane]
                # Iteration i is the work of number i modulo ``workers``, as in the engine.
                turn = (period - ins.stage) % len(workers)
                known = workers[turn]
                for wait in ins.host_waits:
                    # Before the first periods there is nothing to wait for.
                    if period >= wait.lag:
                        learned = passed[wait.producer, period - wait.lag]
                        streams = known.ahead
                        known = _Known(
                            known.host | learned.host,
                            known.done | learned.done,
                            {
                                s: streams.get(s, 0) | learned.ahead.get(s, 0)
                                for s in streams | learned.ahead
                            },
                        )
                # An iteration that does not exist runs no function, but its waits above count.
                if 0 <= period - ins.stage < iterations:
                    known = self._run(ins, period - ins.stage, known)
                workers[turn] = passed[ins.task, period] = known

    def _run(self, ins: Instruction, i: int, known: _Known) -> _Known:
        """Return what the lane knows after the instruction's turn on iteration i."""
        host, done, ahead = known
        self.host_before[ins.task, i] = host
        own = self.bits[ins.task] << i  # the set of this run alone
        host |= own
        limit = self._program.launch_limit
        # Back-pressure: the device has finished the iteration depth + launch_limit before.
        if ins.task == ADMIT and limit is not None and i >= self._program.depth + limit:
            done |= self._through(RETIRE, i - self._program.depth - limit)
        if ins.on_host:
            self.device_before[ins.task, i] = done
            return _Known(host, done | own, ahead)
        before = ahead.get(ins.stream, 0) | done
        # These instructions give no stream any work.
        if ins.task in (*SOURCES, BEGIN):
            self.device_before[ins.task, i] = before
            return _Known(host, done, ahead)
        for wait in ins.event_waits:
            j = i - wait.distance
            exists = wait.producer not in SOURCES and 0 <= j < self._iterations
            # An event orders work only if it is certain to have been recorded before the wait.
            if exists and host & self.bits[wait.producer] << j:
                before |= self._through(wait.producer, j)
        self.device_before[ins.task, i] = before
        return _Known(host, done, {**ahead, ins.stream: before | own})

    def _through(self, task: str, i: int) -> int:
        """Return the runs before the event of this run: the run itself, and all runs before it."""
        return self.device_before[task, i] | self.bits[task] << i


class HappensBefore:
    """The order that a program keeps in every interleaving.

    Args:
        program: A compiled plan.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.streams = program.streams
        instructions = program.instructions
        # All waits point backwards in this order.
        self._order = [instructions[name] for name in program.order]
        self._on_host = {ins.task for ins in self._order if ins.on_host}
        self._walks: dict[int, _Walk] = {}
        # Without a thread group that pulls, ``<admit>`` calls the loader. No other lane waits for
        # ``<retire>``: so an instruction that comes after ``<retire>`` comes after the body, too.
        self._stands_for = {BODY: RETIRE, PULL: PULL if PULL in program.order else ADMIT}

    @property
    def plan(self) -> PipelinePlan:
        """The plan that was compiled."""
        return self.program.resolved.plan

    @classmethod
    def of(cls, resolved: ResolvedPlan, *, streams: bool) -> Self:
        """Return the order that a validated plan keeps on a device with or without streams."""
        return cls(compile_plan(resolved, streams=streams))

    def keeps(self, first: str, then: str, distance: int, *, attribute: bool = False) -> bool:
        """Return whether this order is kept on the host and, with streams, on the device.

        ``<pull>`` is the call of the loader, on any thread. ``<body>`` is what the caller does
        after ``<retire>``, before it comes to the next instruction. If the order is about an
        ``attribute``, and ``then`` is a task of the host alone, the order on the host is enough.
        """
        if not self._ask(first, then, distance, on_device=False):
            return False
        host_only = not self.streams or (attribute and then in self._on_host)
        return host_only or self.device(first, then, distance)

    def host(self, first: str, then: str, distance: int) -> bool:
        """Return whether ``first`` on iteration i returns before ``then`` on i + distance begins.

        Args:
            first: A task, or ``<admit>``, ``<pull>`` or ``<retire>``.
            then: Another of these, or the same.
            distance: Iterations from ``first`` to ``then``; may be negative.

        Returns:
            True if it holds for every i, however many iterations there are.
        """
        return self._ask(first, then, distance, on_device=False)

    def never_beside(self, first: str, then: str, distance: int) -> bool:
        """Return whether two tasks never overlap in time, ``distance`` or more iterations apart."""
        # Iterations that are ``depth`` or more apart are never in flight together.
        return all(
            self.host(first, then, apart) or self.host(then, first, -apart)
            for apart in range(distance, distance + self.program.depth)
        )

    def device(self, first: str, then: str, distance: int) -> bool:
        """Return whether the device work of ``first`` is done before that of ``then`` starts.

        The arguments are those of ``host``. ``<admit>`` and ``<pull>`` have no device work that
        other work waits for: when they return, they are done. Device work that they launch comes
        after the earlier work on the caller's stream.
        """
        return self._ask(first, then, distance, on_device=first not in SOURCES)

    def _ask(self, first: str, then: str, distance: int, *, on_device: bool) -> bool:
        """Return the answer of the walk for this distance."""
        iterations = abs(distance) + 1
        if iterations not in self._walks:
            self._walks[iterations] = _Walk(self.program, self._order, iterations)
        # Of the iterations in this walk, the two asked for are the first and the last.
        walk = self._walks[iterations]
        i = max(0, -distance)
        producer, consumer = (self._stands_for.get(name, name) for name in (first, then))
        before = walk.device_before if on_device else walk.host_before
        return bool(before[consumer, i + distance] & walk.bits[producer] << i)
