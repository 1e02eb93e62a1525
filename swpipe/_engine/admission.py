"""Where iterations come from: back-pressure, the pull of a batch, and its context.

    without a group that pulls     <admit>  wait for the device, pull, make the context
    with one                       <admit>  wait for the device, read the caller's settings
                                   <pull>   pull, make the context

Guarantees
    - The iterator is called by one thread, in order, for iterations that were admitted: at most
      ``depth`` ahead of the one that the caller has.
    - An iteration that was admitted is in flight: its batch is pulled, and it is handed out, also
      by ``drain``, unless the data ends before it.
    - An error of the iterator ends the run as the end of the data does: the iterations before it
      are handed out, and the driver raises it then. Only ``OutOfStepError`` fails the run at once:
      the tasks before could not finish, since the other ranks have other iterations in flight.
    - ``InFlightIterations.total`` is set before the instruction that found the end publishes it.
    - When iteration i is admitted, the device has done iteration i - depth - ``launch_limit``, of
      this run or of an earlier one.

Assumptions
    - Batches given to ``push`` are taken by ``<admit>``: the caller has none ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any

from swpipe._distributed.even_data import EvenIterator, OutOfStepError
from swpipe._engine import release
from swpipe._engine.bind import Step, observe
from swpipe._engine.iterations import InFlight, InFlightIterations, PushedBatches
from swpipe._engine.program import ADMIT, Instruction
from swpipe._engine.randomness import this_thread
from swpipe._engine.torch_state import TorchState
from swpipe.core.context import TypedContext
from swpipe.core.plan import PULL
from swpipe.device import Event
from swpipe.errors import add_note

_NOT_PULLED = TypedContext(None, -1)
"""The context of an iteration that is admitted, before its batch is pulled."""


class Admission:
    """Admits the iterations of one run.

    Attributes:
        iterator: The caller's iterator.
        source: Where the batches come from: the iterator, or what the ranks agree on of it.
        admitted: How many iterations were begun, of which the data may have ended before the last.
        pulled: How many of their batches were pulled.
        data_ended: The iterator had no more.
        failure: What the iterator raised after the last batch, until it is raised by the driver.
        state: The caller's torch settings, for the iterations that are admitted from now on.
        variables: The caller's context variables; likewise.

    Args:
        iterations: Of the run.
        iterator: The caller's iterator.
        source: Where the batches come from.
    """

    def __init__(
        self, iterations: InFlightIterations, iterator: Iterator[Any], source: Iterator[Any]
    ) -> None:
        self.iterator = iterator
        self.source = source
        self.failure: Exception | None = None
        self.admitted = self.pulled = 0
        self.data_ended = False
        self.state: TorchState | None = None
        self.variables: Context | None = None
        self._iterations = iterations
        self._has_streams = iterations.engine.device.has_streams
        self._sources: list[Event | None] = [None] * iterations.depth
        engine = iterations.engine
        # For the plan's streams to wait for; the caller's has what the loader launches before it.
        self._marks_sources = bool(engine.streams)
        self._has_random_tasks = any(task.random for task in engine.tasks.values())
        has_group = PULL in engine.program.instructions
        self._pulls_there = has_group and not isinstance(iterator, PushedBatches)
        self._check = engine.pull_check(iterator) if engine.pull_check else None
        self._agreed = source if isinstance(source, EvenIterator) else None

    def step(self, ins: Instruction, *, observed: bool) -> Step:
        """What the lane does at ``<admit>`` or ``<pull>``.

        Observers are told of the two apart, also where the lane does both at ``<admit>``: one is a
        wait for the device, the other the time that the loader takes.
        """
        admit: Step = self._admit
        pull: Step = self._pull
        if observed:
            admit = observe(self._iterations, replace(ins, task=ADMIT), admit)
            pull = observe(self._iterations, replace(ins, task=PULL), pull)
        if ins.task == PULL:
            return pull if self._pulls_there else lambda i: None
        if self._pulls_there:
            return admit

        def admit_and_pull(i: int) -> None:
            admit(i)
            pull(i)

        return admit_and_pull

    def _admit(self, i: int) -> None:
        iterations = self._iterations
        engine = iterations.engine
        if engine.program.launch_limit is not None:
            self._await_device(engine.ends.get(engine.end_slot(iterations.first + i)))
        admitted = InFlight(_NOT_PULLED, self.state, self.variables, None)
        iterations.slots[i % iterations.depth] = admitted
        self.admitted = i + 1

    def _pull(self, i: int) -> None:
        iterations = self._iterations
        if self._has_streams:
            iterations.engine.device.make_current(iterations.caller_stream)
        try:
            if self._has_random_tasks or this_thread.access is not None:
                with iterations.generators.exclusive():
                    batch = next(self.source)
            else:
                batch = next(self.source)
        except StopIteration:
            self.data_ended = self._agreed is None or not self._agreed.paused
            iterations.total = i
            return
        except OutOfStepError:
            raise
        except Exception as error:
            if iterations.generators.cancelled:  # the run stops, and this may be its interrupt
                raise
            add_note(error, f"swpipe: pulling the batch of iteration {iterations.first + i}")
            self.failure = error
            iterations.total = i
            return
        if self._check is not None:
            self._check.after_pull()
            self._check = None
        iteration: InFlight = iterations.slots[i % iterations.depth]
        if self._agreed is not None and self._agreed.raised:
            iteration.errors, self._agreed.raised = self._agreed.raised, []
        iteration.ctx = iterations.engine.context(batch, iterations.first + i)
        if iterations.engine.releases is not None:
            release.begin(iteration.ctx)
        if self._marks_sources:
            self._mark_source(i, iteration)
        self.pulled = i + 1

    def cancel(self) -> None:
        """Wake whoever waits for the other ranks."""
        if self._agreed is not None:
            self._agreed.left = True

    def take_error(self, i: int) -> Exception | None:
        """Return the next error that the iterator raised before the batch of iteration ``i``."""
        iteration = self._iterations.slots[i % self._iterations.depth]
        if i >= self.pulled or not iteration.errors:
            return None
        error: Exception = iteration.errors.pop(0)
        return error

    def _mark_source(self, i: int, iteration: InFlight) -> None:
        iterations = self._iterations
        device = self._iterations.engine.device
        if device.holds_work(vars(iteration.ctx)):  # the batch, and what the class may add
            # Only then: to wait for the caller's stream is to wait for all the work queued on it.
            source = self._sources[i % iterations.depth] or device.new_event()
            self._sources[i % iterations.depth] = iteration.source = source
            source.record(iterations.caller_stream)

    def _await_device(self, before: Event | None) -> None:
        """Keep the host from launching further ahead of the device."""
        if before is not None:
            self._iterations.await_device(before)
