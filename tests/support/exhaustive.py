"""Every interleaving of a compiled program, one by one: which run always comes before which.

    state    how far each lane is, and what stands in each stream's queue
    moves    a lane passes its next instruction, if its waits are met     (1)
             a stream runs the head of its queue, if its events are met   (2)

All states that can be reached are visited. At each, for every move that could be made now, whatever
is not done yet is struck from what comes before it; what is left in the end always does. Nothing is
shared with ``swpipe.analysis.happens_before``: no clock, no reasoning about iterations; the time
is exponential.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from swpipe.core.plan import StreamRef
from swpipe.program import ADMIT, RETIRE, SOURCES, Instruction, Program

Run = tuple[str, int]
"""A task and an iteration."""


class TooManyError(Exception):
    """The program has more states than the limit."""


Runs = int
"""A set of runs, with a bit for each."""


class Item(NamedTuple):
    """Device work in a queue, and the runs whose events it waits for."""

    run: Run
    awaited: Runs


class State(NamedTuple):
    """A state of the exploration.

    Attributes:
        passed: The number of instructions that each lane has passed.
        queues: The work of each stream that has been submitted and has not run.
        called: Runs whose functions have returned.
        done: Runs whose device work is done.
    """

    passed: tuple[int, ...]
    queues: tuple[tuple[Item, ...], ...]
    called: Runs
    done: Runs


class Exhaustive:
    """An exploration of one program over some iterations.

    Args:
        program: A compiled plan.
        iterations: The number of iterations.
        streams: Whether its device has streams.
        most: States after which to give up.
        loader: Whether calls of the loader have work on the caller's stream.

    Attributes:
        host_before: Run to the runs whose functions always have returned when it is called.
        device_before: Run to the runs whose device work is always done when its own starts.
        states: The number of states.

    Raises:
        TooManyError: There are more states than ``most``.
    """

    def __init__(
        self, program: Program, iterations: int, *, streams: bool, most: int, loader: bool = True
    ) -> None:
        self._bits = {
            (task, i): 1 << n
            for n, (task, i) in enumerate(product(program.instructions, range(iterations)))
        }
        self._host_before: dict[Run, Runs] = {}
        self._device_before: dict[Run, Runs] = {}
        self._program = program
        self._iterations = iterations
        self._has_streams, self._loader = streams, loader
        names: dict[StreamRef, None] = {ins.stream: None for ins in program.instructions.values()}
        self._streams = list(names)
        # Each worker of a lane is a thread, which skips the periods of others.
        self._threads = [
            (n, w) for n, lane in enumerate(program.lanes) for w in range(lane.workers)
        ]
        begin = tuple(self._first(*thread) for thread in self._threads)
        start = State(begin, ((),) * len(names), 0, 0)
        seen, left = {start}, [start]
        while left:
            for state in self._moves(left.pop()):
                if state not in seen:
                    seen.add(state)
                    left.append(state)
            if len(seen) > most:
                raise TooManyError
        self.states = len(seen)
        self.host_before = self._named(self._host_before)
        self.device_before = self._named(self._device_before)

    def _named(self, before: dict[Run, Runs]) -> dict[Run, frozenset[Run]]:
        bits = self._bits.items()
        return {
            of: frozenset(run for run, bit in bits if runs & bit) for of, runs in before.items()
        }

    def _moves(self, state: State) -> list[State]:
        lanes = (self._pass(state, lane) for lane in range(len(state.passed)))
        streams = (self._run(state, stream) for stream in range(len(state.queues)))
        return [after for after in (*lanes, *streams) if after is not None]

    def _first(self, lane: int, worker: int) -> int:
        """Return the number of a worker's first instruction."""
        of = self._program.lanes[lane]
        return (of.instructions[0].stage + worker) % of.workers * len(of.instructions)

    def _pass(self, state: State, thread: int) -> State | None:
        """(1) Return the state after a thread's next instruction, or None if it has to wait."""
        lane, _ = self._threads[thread]
        of = self._program.lanes[lane]
        period, position = divmod(state.passed[thread], len(of.instructions))
        ins = of.instructions[position]
        if period >= self._iterations + self._program.depth - 1:
            return None
        step = 1
        if position == len(of.instructions) - 1:
            step += (of.workers - 1) * len(of.instructions)
        passed = (*state.passed[:thread], state.passed[thread] + step, *state.passed[thread + 1 :])
        for wait in ins.host_waits:
            other = self._program.lanes[wait.lane]
            turn = (period - wait.lag - other.instructions[0].stage) % other.workers
            awaited = state.passed[self._threads.index((wait.lane, turn))]
            if awaited <= (period - wait.lag) * len(other.instructions) + wait.position:
                return None
        i = period - ins.stage
        if not 0 <= i < self._iterations:
            return state._replace(passed=passed)
        limit = self._program.launch_limit
        if ins.task == ADMIT and limit is not None:
            held_up_by = self._bits.get((RETIRE, i - self._program.depth - limit))
            if held_up_by is not None and not state.done & held_up_by:
                return None
        _strike(self._host_before, (ins.task, i), state.called)
        called = state.called | self._bits[ins.task, i]
        done = state.done
        if ins.task in SOURCES:  # nobody waits for what a loader has the device do
            done |= self._bits[ins.task, i]
        return State(passed, self._queued(state, ins, i), called, done)

    def _queued(self, state: State, ins: Instruction, i: int) -> tuple[tuple[Item, ...], ...]:
        """Return the queues after an instruction has submitted its work."""
        if not self._has_streams or (ins.task in SOURCES and not self._loader):
            return state.queues
        awaited = 0
        for wait in ins.event_waits:
            if wait.producer not in SOURCES:
                awaited |= self._bits.get((wait.producer, i - wait.distance), 0)
        # To wait for an event that was never recorded is to wait for nothing.
        item = Item((ins.task, i), awaited & state.called)
        n = self._streams.index(ins.stream)
        return (*state.queues[:n], (*state.queues[n], item), *state.queues[n + 1 :])

    def _run(self, state: State, n: int) -> State | None:
        """(2) Return the state after the head of a queue, or None if it has to wait."""
        if not state.queues[n] or state.queues[n][0].awaited & ~state.done:
            return None
        run = state.queues[n][0].run
        _strike(self._device_before, run, state.done)
        queues = (*state.queues[:n], state.queues[n][1:], *state.queues[n + 1 :])
        return state._replace(queues=queues, done=state.done | self._bits[run])


def _strike(before: dict[Run, Runs], run: Run, done: Runs) -> None:
    """Remove from the runs before ``run`` those that are not done in this state."""
    before[run] = before.get(run, done) & done
