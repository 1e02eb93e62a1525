"""Admission of iterations: back-pressure, the pull of a batch, and its context.

    without a group that pulls     <admit>  wait for the device, pull, make the context
    with one                       <admit>  wait for the device, read the caller's settings
                                   <pull>   pull, make the context

Guarantees
    - The iterator is called by one thread, in order, for iterations that were admitted: at most
      ``depth`` ahead of the last one that was handed out.
    - An iteration that was admitted is in flight: its batch is pulled, and it is handed out, also
      by ``drain``, unless the data ends before it.
    - An error of the iterator ends the run as the end of the data does: the driver hands out the
      iterations before it and then raises it. Only ``OutOfStepError`` fails the run at once: the
      tasks before could not finish, because the other ranks have other iterations in flight.
    - ``InFlightIterations.total`` is set before the instruction that found the end publishes it.
    - When iteration i is admitted, the device has finished iteration i - depth - ``launch_limit``,
      of this run or of an earlier one.

Assumptions
    - ``<admit>`` takes the batches given to ``push``, on the caller's thread: a group that pulls
      has nothing to pull ahead.
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
from swpipe._engine.randomness import this_thread
from swpipe._engine.torch_state import TorchState
from swpipe.core.context import TypedContext
from swpipe.core.plan import PULL
from swpipe.device import Event
from swpipe.errors import add_note
from swpipe.program import ADMIT, Instruction

_NOT_PULLED = TypedContext(None, -1)
"""The context of an admitted iteration whose batch is not yet pulled."""


class Admission:
    """The part of a run that admits its iterations.

    Attributes:
        iterator: The caller's iterator.
        source: The iterator that batches are pulled from: the caller's, or on several ranks the one
            that the ranks agree on.
        admitted: How many iterations were begun; the data may have ended before the last of them.
        pulled: How many batches were pulled for them.
        data_ended: Whether the iterator has ended.
        errors: The errors that the iterator raised and that are not raised to the caller yet, each
            with the number of the iteration whose batch would have been next.
        state: The caller's torch settings, for the iterations that are admitted from now on.
        variables: The caller's context variables, likewise.

    Args:
        iterations: The iterations of the run.
        iterator: The caller's iterator.
        source: The iterator that batches are pulled from.
    """

    def __init__(
        self, iterations: InFlightIterations, iterator: Iterator[Any], source: Iterator[Any]
    ) -> None:
        self.iterator = iterator
        self.source = source
        self.errors: list[tuple[int, Exception]] = []
        self.admitted = self.pulled = 0
        self.data_ended = False
        self.state: TorchState | None = None
        self.variables: Context | None = None
        self._iterations = iterations
        self._has_streams = iterations.engine.device.has_streams
        self._sources: list[Event | None] = [None] * iterations.depth
        engine = iterations.engine
        # The plan's streams wait for an event at each batch. The caller's stream needs none: the
        # loader's launches are before it on the same stream.
        self._marks_sources = bool(engine.streams)
        self._has_random_tasks = any(task.random for task in engine.tasks.values())
        has_group = PULL in engine.program.instructions
        self._pulls_there = has_group and not isinstance(iterator, PushedBatches)
        self._check = engine.pull_check(iterator) if engine.pull_check else None
        self._agreed = source if isinstance(source, EvenIterator) else None

    def step(self, ins: Instruction, *, observed: bool) -> Step:
        """Return the function that a lane calls at ``<admit>`` or ``<pull>``.

        Observers get the two as separate instructions, even if the lane runs both at ``<admit>``:
        the first is a wait for the device, the second is the time that the loader takes.
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
        # The slot is free: the iteration ``depth`` before was retired in an earlier period.
        admitted = InFlight(_NOT_PULLED, self.state, self.variables, None)
        iterations.slots[i % iterations.depth] = admitted
        self.admitted = i + 1

    def _pull(self, i: int) -> None:
        iterations = self._iterations
        if self._has_streams:
            iterations.engine.device.make_current(iterations.caller_stream)
        try:
            # A loader may draw from the generators that tasks with ``random=True`` seed, so it gets
            # exclusive access as they do.
            if self._has_random_tasks or this_thread.access is not None:
                with iterations.generators.exclusive():
                    batch = next(self.source)
            else:
                batch = next(self.source)
        except StopIteration:
            # A paused iterator stops between two steps of the ranks, for ``drain``. Its data has
            # not ended.
            self.data_ended = self._agreed is None or not self._agreed.paused
            iterations.total = i
            return
        except OutOfStepError:
            raise
        except Exception as error:
            if iterations.generators.cancelled:  # the run stops, and this may be its interrupt
                raise
            add_note(error, f"swpipe: pulling the batch of iteration {iterations.first + i}")
            self.errors.append((i, error))
            iterations.total = i
            return
        if self._check is not None:
            self._check.after_pull()
            self._check = None
        iteration: InFlight = iterations.slots[i % iterations.depth]
        if self._agreed is not None:
            self.errors += [(i, error) for error in self._agreed.raised]
            self._agreed.raised = []
        iteration.ctx = iterations.engine.context(batch, iterations.first + i)
        if iterations.engine.releases is not None:
            release.begin(iteration.ctx)
        if self._marks_sources:
            self._mark_source(i, iteration)
        # Set last: if an interruption comes before, the iteration counts as not pulled.
        self.pulled = i + 1

    def cancel(self) -> None:
        """Wake a pull that waits for the other ranks."""
        if self._agreed is not None:
            self._agreed.left = True

    def take_error(self, i: int) -> Exception | None:
        """Return the next error that the iterator raised before the batch of iteration ``i``."""
        # An error after the last batch comes before no iteration that is pulled.
        is_due = i < self.pulled and self.errors and self.errors[0][0] <= i
        return self.errors.pop(0)[1] if is_due else None

    def _mark_source(self, i: int, iteration: InFlight) -> None:
        iterations = self._iterations
        device = self._iterations.engine.device
        # The class of the context may add attributes to the batch, so all of them are looked at.
        if device.holds_work(vars(iteration.ctx)):
            # No event for a batch in host memory: it would make tasks wait for all work that is
            # queued on the caller's stream.
            source = self._sources[i % iterations.depth] or device.new_event()
            self._sources[i % iterations.depth] = iteration.source = source
            source.record(iterations.caller_stream)

    def _await_device(self, before: Event | None) -> None:
        """Keep the host from launching further ahead of the device than the plan allows."""
        if before is not None:
            self._iterations.await_device(before)
