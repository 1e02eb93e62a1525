"""Drives a pipeline: one run after another, one call at a time, and one way to end.

    progress, drain, ...   enter --> advance the run --> leave
    close(), anywhere      closed = True, run.stop()      flags only: no lock, no wait
                           a call under way ------------> ends the run when it leaves
                           no call under way -----------> close() ends it

Guarantees
    - ``close`` may be called anywhere: by a signal handler in the middle of another call, by a
      task, by another thread, or twice. What the handler or the task raises comes out as itself.
    - An exception may arrive at any place (Ctrl-C). The next call finds out that the last one was
      cut short, ends what it has left, and begins anew; or, where nothing was lost, goes on.
    - Ending may be cut short as well: every step can be done again.

    - An error of the iterator is raised once, when the iterations before it have been handed out:
      by the call that finds nothing before it, or else by the next ``progress`` or ``fill``.
    - On several ranks with ``check_data``, runs pull what the ranks have agreed on.

Assumptions
    - Whoever is cut short lets the exception out: nobody resumes a suspended call (a greenlet).
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, cast

from swpipe._distributed.batches_left import KnowsItsEnd, batches_left
from swpipe._distributed.even_data import EvenData, EvenIterator, OutOfStepError, UnevenDataError
from swpipe._distributed.rank_checks import check_same_plan, is_alone, tell_failure
from swpipe._engine.exclusive import ExclusiveAccess
from swpipe._engine.iterations import Engine, PushedBatches
from swpipe._engine.randomness import LentAccess, lend_access, this_thread
from swpipe._engine.run import JOIN_GRACE_S, Run
from swpipe._engine.watchdog import Watchdog
from swpipe.core.context import C
from swpipe.core.messages import shown
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.errors import add_note
from swpipe.shortcut import Shortcuts

PULL_GRACE_S = 1.0
"""How long, at most, what is dropped waits for a batch that is being pulled."""

INTERRUPTED = "the last call was interrupted, which drops the iterations in flight"


def end_dropped(run: Run, watchdog: Watchdog, made_at: tuple[str, int]) -> None:
    """End a run whose pipeline nobody refers to any more, and say in which file and line it was."""
    if run.ended:  # and the call that ended it was cut short before it told this finalizer
        return
    run.end()
    watchdog.stop()
    text = (
        "a pipeline with iterations in flight was dropped without close(): use "
        "'with SWPipeline(...) as pipe', or call close()"
    )
    warnings.warn_explicit(text, ResourceWarning, *made_at)


def checked_start(number: object) -> int:
    """``number``; ValueError if no iteration can have it."""
    if type(number) is int and number >= 0:
        return number
    raise ValueError(
        f"start_iteration is {shown(number)}: give the number of the first iteration, an integer "
        "from 0"
    )


class Driver(Generic[C]):
    """Runs the iterations of one pipeline, whose contexts are of class ``C``.

    Attributes:
        engine: What the next run uses.
        run: The one in flight; None if nothing is.
        drained: Contexts that were complete when ``drain`` failed; the next ``drain`` returns them.
        next_iteration: The number of the next run's first iteration.
        lost: Why no state leads back to what was in flight last; empty if nothing was lost.
    """

    def __init__(
        self,
        engine: Engine,
        plan: PipelinePlan,
        stall_timeout_s: float | None,
        *,
        check_ranks: bool,
        check_data: bool,
        made_at: tuple[str, int],
    ) -> None:
        self.engine = engine
        self.run: Run | None = None
        self.drained: list[C] = []
        self.next_iteration = 0
        self.lost = ""
        self.access = ExclusiveAccess()
        self._plan = plan
        self._stall_timeout_s = stall_timeout_s
        self._check_ranks = check_ranks
        self._made_at = made_at
        self._watchdog: Watchdog | None = None
        self._dropped: weakref.finalize[..., Driver[C]] | None = None
        self._lent: LentAccess | None = None  # the generators, by an outer pipeline's task
        self._check_data = check_data
        self._even: EvenData | None = None
        self._agreed: EvenIterator | None = None  # of the iterator that was used last
        self._out_of_step = ""  # why no iteration can be run any more
        self._errors: list[Exception] = []  # of the iterator, with nothing before them in flight
        self._ended: Iterator[Any] | None = None
        self._failed: Iterator[Any] | None = None  # the last run's, where it raised an error
        self._oldest = 0  # the iteration that would have been handed out next when a run ended
        self._pushed = PushedBatches()

    @property
    def in_flight(self) -> int:
        """How many iterations have been pulled and not been handed out."""
        return len(self.drained) + (0 if self.run is None else self.run.in_flight)

    def __enter__(self) -> None:
        self.access.enter(sys._getframe(1))
        run = self.run
        if run is not None and (run.in_call or run.stopping) and run.interrupted:
            self._end_with_warning(run)
        self._lent = None if this_thread.access is None else lend_access()

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        try:
            if self._lent is not None:
                self._lent.take_back(kind)
        finally:
            if not self.access.leave():
                self.close()

    def fill(self, iterator: Iterator[Any]) -> None:
        """Run the prologue."""
        with self:
            self._end_idle()
            if self.run is not None:
                raise RuntimeError(
                    f"the pipeline is full: iterations are in flight ({self.in_flight}). Call "
                    "progress() with the iterator that it was filled from, or drain() first"
                )
            run = self._prepared(iterator)
            while run.period < self.engine.program.depth - 1 and not run.finished:
                self._advance(run)
            run.settle()
            if run.failure is not None:
                self._advance(run)  # which raises it
            if self.run is None:
                self._raise_error()

    def progress(self, iterator: Iterator[Any], length: int | None = None) -> C:
        """Run one period, or as many as it takes to hand out an iteration.

        Args:
            iterator: Where the batches come from.
            length: How many it has, where that is known and the iterator does not say so.
        """
        with self:
            if self.run is None:
                self._raise_error()
            # If it called the iterator again instead, one that restarts would never end.
            ended = self._ended
            self._ended = None
            if self.run is None and ended is not None and ended is iterator:
                raise StopIteration
            run = self._prepared(iterator, length)
            if (ctx := self._next(run)) is not None:
                return ctx
            if self.run is run:  # the end of the data was found between two calls
                self._end(run)
            self._raise_error()
            self._ended = None
            raise StopIteration

    def current_iterator(self) -> Iterator[Any]:
        """That of the iterations in flight, or of the data that has just ended; or TypeError."""
        ended = self._ended or self._failed
        iterator = ended if self.run is None else self.run.admission.iterator
        if iterator is None or iterator is self._pushed:
            raise TypeError(
                "progress() has no iterator to go on with: give it iter(loader), or call "
                "fill_pipeline(loader) before"
            )
        return iterator

    def push(self, batch: Any) -> C | None:
        """Run one period on a batch; what it handed out."""
        with self:
            run = self._prepared(self._pushed)
            self._pushed.batches = (batch,)
            try:
                return self._advance(run)
            finally:
                self._pushed.batches = ()

    def flush(self) -> Iterator[C]:
        """Finish the pushed batches, one with each context that is asked for."""
        with self:
            run = self.run
            if run is not None and run.in_flight and run.admission.iterator is not self._pushed:
                raise self._mixed(run, self._pushed)
            if run is not None:
                run.read_callers_settings()
                run.stop_admitting()
                run.flushing = True
        return self._flushed(run)

    def _flushed(self, run: Run | None) -> Iterator[C]:
        while self.drained:
            yield self.drained.pop(0)
        while run is not None and self.run is run:
            with self:
                run.read_callers_settings()
                ctx = self._next(run)
                if ctx is None:
                    self._end(run)
                    return
            yield ctx
            del ctx  # this frame must not keep what the user drops

    def drain(self) -> list[C]:
        """Stop admitting, finish what is in flight, and hand it out."""
        with self:
            run = self.run
            if run is not None:
                run.read_callers_settings()
                agreed = self._agreed if run.admission.source is self._agreed else None
                if agreed is None:
                    run.stop_admitting()
                else:  # all ranks have agreed to run what it has pulled early
                    run.settle()  # a thread that pulls has pulled as much on all ranks then
                    agreed.paused = run.draining = True
                try:
                    self._drain(run)
                finally:
                    if agreed is not None:
                        agreed.paused = False
            contexts = self.drained
            self.drained = []
            return contexts

    def _drain(self, run: Run) -> None:
        # The data may turn out to have ended before the last iteration that was admitted.
        while not run.over:
            while (error := run.admission.take_error(run.retired)) is not None:
                self._errors.append(error)
            if (ctx := self._advance(run)) is not None:
                self.drained.append(ctx)
        if self.run is run:
            self._end(run)

    def state_dict(self, check: bool) -> dict[str, int]:
        """Number of the next iteration to hand out, batches pulled beyond it, and the seed.

        Raises:
            RuntimeError: A call is under way; or, where ``check``, what was in flight last is lost.
        """
        if self.access.holder() is not None:
            raise RuntimeError(
                "state_dict() was called within a call of the pipeline, by a task, the loader or "
                "another thread: tasks of the iteration may still change what you save. Save "
                "between two calls, as in the body of the loop"
            )
        if check and not self.access.closed:
            with self:
                if self.run is not None:
                    self.run.settle()
        run = self.run
        number = self.next_iteration
        if check and (self.lost or (run is not None and run.interrupted)):
            raise RuntimeError(
                f"{self.lost or INTERRUPTED}, and their tasks may have changed what you save: go "
                "on from the last state that was saved"
            )
        if run is not None:
            number = run.iterations.first + run.retired
        if self.drained:  # a run that has failed may have dropped later ones
            number = self.drained[0].iter_idx
        seed = self.engine.seeds.seed
        early = 0 if self._agreed is None else self._agreed.waiting
        return {"next_iteration": number, "in_flight": self.in_flight + early, "seed": seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take number and seed from a saved state; within a call, with nothing in flight."""
        for name in ("next_iteration", "seed"):
            value = state.get(name) if isinstance(state, Mapping) else None
            if type(value) is not int or (name == "next_iteration" and value < 0):
                raise ValueError(
                    f"the state's {name} is {shown(value)}: give what state_dict() returned"
                )
        self.next_iteration = state["next_iteration"]
        self.lost = ""
        self._errors.clear()
        self._agreed = None
        self.engine.seeds.seed = state["seed"]

    def drop(self) -> int:
        """Drop what is in flight; how many iterations that were. A closed pipeline has none."""
        if self.access.closed:
            return 0
        with self:
            run = self.run
            dropped = len(self.drained)
            self.drained.clear()
            if run is not None:
                run.stop()
                run.join(PULL_GRACE_S)
                dropped += run.admission.pulled - run.retired
                self._end(run)
                self.next_iteration = self._oldest
                self.lost = ""
            elif self.lost:  # by a failure of the oldest, which keeps its number
                self.next_iteration = self._oldest + 1
            self._errors.clear()
            return dropped

    def refuse_in_flight(self, purpose: str) -> None:
        """Raise RuntimeError if iterations are in flight; within a call."""
        self._end_idle()
        if self.run is not None:
            raise RuntimeError(
                f"iterations are in flight ({self.in_flight}): finish their iterator, or call "
                f"drain(), before {purpose}"
            )

    @contextmanager
    def borrowed(self, shortcuts: Shortcuts, context: type[C]) -> Iterator[None]:
        """Other shortcuts and contexts, and no check, within the block; then all is as it was."""
        engine = self.engine
        next_iteration = self.next_iteration
        self.engine = replace(engine, shortcuts=shortcuts, check=None, context=context)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first failure is the one to raise
                self.drain()
            raise
        finally:
            self.engine = engine
            self.next_iteration = next_iteration

    def close(self) -> None:
        """Stop the threads and drop what is in flight, or make the call under way do so."""
        self.access.close()
        if self.access.forked:  # whoever held the lock is not in this process
            self.run = None
        run = self.run
        if run is not None:
            run.stop()
        deadline = time.monotonic() + JOIN_GRACE_S
        while not self.access.forked and not self.access.enter_to_close(sys._getframe()):
            if self._must_not_wait(run) or time.monotonic() > deadline:
                return  # the call under way sees the flags
            time.sleep(1e-3)
        try:
            self._end_all()
        finally:
            self.access.leave()

    def _must_not_wait(self, run: Run | None) -> bool:
        """Whether the call under way may itself wait for the calling thread."""
        ident = threading.get_ident()
        workers = () if run is None else run.lanes[1:]
        return self.access.holder() == ident or any(
            lane.thread is not None and lane.thread.ident == ident for lane in workers
        )

    def _prepared(self, iterator: Iterator[Any], length: int | None = None) -> Run:
        """The run over this iterator, ready to be advanced by the calling thread."""
        run = self.run
        if run is None or run.admission.iterator is not iterator:
            self._end_idle()
            if self.run is None:
                self._raise_error()
            run = self.run or self._begin(iterator, length)
            if run.admission.iterator is not iterator:
                raise self._mixed(run, iterator)
        if run.draining:
            if run.flushing:
                raise RuntimeError(
                    "flush() was not iterated to its end: iterate over it, or call drain(), before "
                    "anything else"
                )
            raise RuntimeError("drain() was interrupted: call it again before anything else")
        run.read_callers_settings()
        return run

    def _end_idle(self) -> None:
        """End a run of which nothing is in flight: whatever comes next may begin anew."""
        run = self.run
        if run is not None and not run.draining:
            run.settle()
        if run is not None and not run.in_flight and not run.draining:
            run.stop_admitting()
            if run.over:  # no failure is left to raise
                self._end(run)

    def _raise_error(self) -> None:
        """Raise what the iterator raised after the batch that was handed out last, if it did."""
        if self._errors:
            error = self._errors.pop(0)
            if not isinstance(error, UnevenDataError):  # all ranks have it
                tell_failure(error)
            try:
                raise error
            finally:
                del error  # whose traceback refers to this frame

    def _source(self, iterator: Iterator[Any], length: int | None) -> Iterator[Any]:
        """Return what a run over ``iterator`` pulls: on several ranks, what they agree on."""
        if self._out_of_step:
            raise RuntimeError(
                f"the ranks are out of step, and their collectives would not match any more: "
                f"{self._out_of_step}. Close the pipeline, and start the job again on all ranks"
            )
        agreed_there = isinstance(iterator, KnowsItsEnd) and iterator.agreed
        if iterator is self._pushed or agreed_there or is_alone():
            return iterator
        overlaps = self.engine.program.depth > 1
        if self._even is None:
            # Its own time-out comes before the watchdog's, since it says more.
            wait_s = 600.0 if self._stall_timeout_s is None else 0.9 * self._stall_timeout_s
            # The answers take a round trip: they are awaited one step later.
            self._even = EvenData("error", ahead=int(overlaps), timeout_s=wait_s)
        agreed = self._agreed
        if agreed is None or agreed.over or agreed.source is not iterator:
            left = batches_left(iterator) if length is None else length
            # A call under way is the watchdog's; between two, a thread that pulls may wait.
            limited = self._stall_timeout_s is not None and PULL in self.engine.program.instructions
            agreed = EvenIterator(
                self._even, iterator, length=left, keeps_step=overlaps, limited=limited
            )
        agreed.left = False
        self._agreed = agreed
        return agreed

    def _begin(self, iterator: Iterator[Any], length: int | None = None) -> Run:
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"progress() takes an iterator, not {type(iterator).__name__}: "
                "pass iter(loader), and the same one each time"
            )
        self.agree()
        source = self._source(iterator, length) if self._check_data else iterator
        run = self.run = Run(self.engine, iterator, source, self.next_iteration)
        self.lost = ""
        if self.access.closed:  # by now, when there was no run to stop
            run.stop()
        try:
            run.start()
            owner = weakref.ref(self)
            watchdog = Watchdog(run, self._stall_timeout_s, self.access.holder, owner)
            self._watchdog = watchdog
            watchdog.start()
            # Not __del__: what a signal handler raises within that is lost, at each end of a run.
            self._dropped = weakref.finalize(self, end_dropped, run, watchdog, self._made_at)
            self._dropped.atexit = False
        except BaseException:
            self._end(run)
            raise
        return run

    def begin_serial(self, number: int) -> None:
        """An iteration is run serially; if it fails, it is lost and keeps its number."""
        self.lost = f"iteration {number} was run serially, and has failed"
        self._oldest = number

    def agree(self) -> None:
        """Compare the plan across ranks, once; a collective."""
        if self._check_ranks:
            seeds = [self.engine.seeds.seed for t in self.engine.tasks.values() if t.random]
            check_same_plan(self._plan, *seeds[:1])
            self._check_ranks = False

    def _mixed(self, run: Run, iterator: Iterator[Any]) -> RuntimeError:
        source = "of another iterator"
        end = "finish it, or call drain()"
        if run.admission.iterator is self._pushed:
            source = "of pushed batches"
            end = "call flush()"
        return RuntimeError(
            f"iterations {source} are in flight ({run.in_flight}): {end} to get them, before "
            f"giving {'a batch to push()' if iterator is self._pushed else 'progress() a new one'}"
        )

    def _next(self, run: Run) -> C | None:
        """The next context; None where there is no further one."""
        while not run.over:
            if (error := run.admission.take_error(run.retired)) is not None:
                self._errors.append(error)
                del error
                self._raise_error()
            if (ctx := self._advance(run)) is not None:
                return ctx
        return None

    def _advance(self, run: Run) -> C | None:
        try:
            ctx = cast("C | None", run.advance())
        except BaseException as error:
            for left in self._end(run):
                add_note(error, left)
            if isinstance(error, OutOfStepError):
                self._out_of_step = str(error)
            tell_failure(error)
            raise
        if run.over:
            self._end(run)
        return ctx

    def _end(self, run: Run) -> list[str]:
        """End the run, whatever was done of that before; returns which tasks have not returned."""
        run.end()
        if self._watchdog is not None:
            if not self.access.forked:  # its thread is the parent's
                self._watchdog.stop()
            self._watchdog = None
        if self._dropped is not None:
            self._dropped.detach()
        first = run.iterations.first
        self._oldest = first + run.retired
        if run.admission.pulled > run.retired:
            numbers = f"{self._oldest} to {first + run.admission.pulled - 1}"
            self.lost = f"iterations {numbers} were dropped by a failure or by close()"
        self.next_iteration = first + run.admission.pulled
        self._ended = run.admission.iterator if run.admission.data_ended and run.retired else None
        self._failed = run.admission.iterator if run.admission.failure is not None else None
        self.run = None
        notes = [f"swpipe: {left}; its thread ends when that returns" for left in run.left_inside()]
        waiting, run.admission.failure = run.admission.failure, None
        if waiting is not None and run.finished:
            self._errors.append(waiting)
        elif waiting is not None:
            text = f"swpipe: dropped, too, what the iterator raised: {type(waiting).__name__}"
            notes.append(f"{text}: {waiting}")
        return notes

    def _end_all(self) -> None:
        self.drained.clear()
        if self.run is not None:
            self._end_with_warning(self.run)
        self._errors.clear()
        self._agreed = None
        even = self._even
        self._even = None
        if even is not None and not self.access.forked:
            even.close()

    def _end_with_warning(self, run: Run) -> None:
        if run.flushing and run.in_flight and run.failure is None:
            text = (
                f"flush() was not iterated to its end, and {run.in_flight} pushed batches are "
                "dropped: iterate over it (for ctx in pipe.flush()), or call drain()"
            )
            warnings.warn_explicit(text, RuntimeWarning, *self._made_at)
        for left in self._end(run):
            warnings.warn_explicit(left, RuntimeWarning, *self._made_at)
