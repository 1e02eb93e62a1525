"""The driver of a pipeline: it starts runs, advances them call by call, and ends them.

    progress, drain, ...   enter --> advance the run --> leave
    close(), anywhere      closed = True, run.stop()      flags only: no lock, no wait
                           a call under way ------------> ends the run when it leaves
                           no call under way -----------> close() ends it

Guarantees
    - ``close`` may be called anywhere: by a signal handler in the middle of another call, by a
      task, by another thread, or twice. An exception that the handler or the task raises keeps its
      type.
    - An exception may arrive at any place (Ctrl-C). The next call detects that the previous call
      was interrupted. It ends the interrupted run and begins a new one; if no iteration was lost,
      it continues the run.
    - Ending a run may be interrupted as well: every step of it can be repeated.

    - An error of the iterator is raised once, when the iterations before it have been handed out:
      by the call that finds no iteration before it, or else by the next ``progress`` or ``fill``.
    - On several ranks with ``check_data``, a run pulls only the batches that the ranks agreed on.

Assumptions
    - An interrupted call lets the exception propagate: nobody resumes a suspended call, as a
      greenlet library could.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, cast

from swpipe._distributed.even_data import OutOfStepError, UnevenDataError
from swpipe._distributed.rank_checks import check_same_plan, tell_failure
from swpipe._engine.exclusive import ExclusiveAccess
from swpipe._engine.iterations import Engine, PushedBatches
from swpipe._engine.randomness import BlockAccess, lend_access, this_thread
from swpipe._engine.run import Run
from swpipe._engine.watchdog import Watchdog
from swpipe.core.context import C
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan
from swpipe.errors import add_note
from swpipe.shortcut import Shortcuts

if TYPE_CHECKING:
    from swpipe._engine.agreed_passes import AgreedPasses

PULL_GRACE_S = 1.0
"""The longest time in seconds for which ``drop`` waits for a batch that is being pulled."""

INTERRUPTED = "the last call was interrupted, which drops the iterations in flight"


def end_dropped(run: Run, watchdog: Watchdog, made_at: tuple[str, int]) -> None:
    """End the run of a pipeline that was garbage-collected, and warn with its file and line."""
    # The call that ended the run was interrupted before it could detach this finalizer.
    if run.ended:
        return
    run.end()
    watchdog.stop()
    text = (
        "a pipeline with iterations in flight was dropped without close(): use "
        "'with SWPipeline(...) as pipe', or call close()"
    )
    warnings.warn_explicit(text, ResourceWarning, *made_at)


def checked_start(number: object) -> int:
    """Return ``number``; raise ValueError if it is not a valid iteration number."""
    if type(number) is int and number >= 0:
        return number
    raise ValueError(
        f"start_iteration is {shown(number)}: give the number of the first iteration, an integer "
        "from 0"
    )


class Driver(Generic[C]):
    """The object that runs the iterations of one pipeline, whose contexts are of class ``C``.

    Attributes:
        engine: The engine that the next run uses.
        run: The run with iterations in flight; None if there is none.
        drained: Contexts that were complete when ``drain`` failed; the next ``drain`` returns them.
        next_iteration: The number of the next run's first iteration, from 0.
        lost: The reason why the state before the last iterations in flight cannot be restored;
            empty if nothing was lost.
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
        # The access to the random generators that a task of an outer pipeline lends to this call.
        self._lent: BlockAccess | None = None
        self._passes: AgreedPasses | None = None
        # Without it, each rank pulls by itself, and the module is not loaded.
        if check_data:
            from swpipe._engine.agreed_passes import AgreedPasses

            self._passes = AgreedPasses(engine.program, stall_timeout_s)
        # Errors of the iterator that are due: no iteration before them is in flight.
        self._errors: list[Exception] = []
        self._ended: Iterator[Any] | None = None
        # The iterator of the last run, if that iterator raised an error.
        self._failed: Iterator[Any] | None = None
        # The iteration that would have been handed out next when the last run ended.
        self._oldest = 0
        self._pushed = PushedBatches()

    @property
    def in_flight(self) -> int:
        """The number of iterations that were pulled and not handed out."""
        return len(self.drained) + (0 if self.run is None else self.run.in_flight)

    def __enter__(self) -> None:
        self.access.enter(sys._getframe(1))
        # If an exception such as Ctrl-C interrupted the previous call, its run cannot continue: a
        # task may have run only in part. If a task of another pipeline makes this call, it lends
        # its access to the random generators, or tasks of this pipeline would wait forever.
        run = self.run
        if run is not None and (run.in_call or run.stopping) and run.interrupted:
            self._end_with_warning(run)
        self._lent = None if this_thread.access is None else lend_access()

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        try:
            if self._lent is not None:
                self._lent.take_back(kind)
        finally:
            # ``close`` came during this call and could not end the run itself, so this call does.
            if not self.access.leave():
                self.close()

    def fill(self, iterator: Iterator[Any]) -> None:
        """Run the prologue: admit iterations until the pipeline is full or the data ends."""
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
                # The worker's failure is raised by ``advance``.
                self._advance(run)
            if self.run is None:
                self._raise_error()

    def progress(self, iterator: Iterator[Any], length: int | None = None) -> C:
        """Run periods until one of them hands out an iteration, and return its context.

        Args:
            iterator: The iterator that yields the batches.
            length: The number of batches, if it is known and the iterator does not provide it.

        Raises:
            StopIteration: All iterations of the iterator were handed out.
        """
        with self:
            if self.run is None:
                self._raise_error()
            # If this call used an ended iterator again, a loop over an iterator that restarts would
            # never end.
            ended = self._ended
            self._ended = None
            if self.run is None and ended is not None and ended is iterator:
                raise StopIteration
            run = self._prepared(iterator, length)
            if (ctx := self._next(run)) is not None:
                return ctx
            # A thread found the end of the data between two calls.
            if self.run is run:
                self._end(run)
            self._raise_error()
            self._ended = None
            raise StopIteration

    def current_iterator(self) -> Iterator[Any]:
        """Return the iterator of the iterations in flight, or the one that has just ended.

        Raises:
            TypeError: There is neither, or the batches were given to ``push``.
        """
        ended = self._ended or self._failed
        iterator = ended if self.run is None else self.run.admission.iterator
        if iterator is None or iterator is self._pushed:
            raise TypeError(
                "progress() has no iterator to continue with: pass iter(loader), or call "
                "fill_pipeline(loader) first"
            )
        return iterator

    def push(self, batch: Any) -> C | None:
        """Run one period on a batch, and return the context that it hands out, if any."""
        with self:
            run = self._prepared(self._pushed)
            self._pushed.batches = (batch,)
            try:
                return self._advance(run)
            finally:
                self._pushed.batches = ()

    def flush(self) -> Iterator[C]:
        """Return an iterator that finishes the pushed batches and yields one context at a time."""
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
            # A reference in this suspended frame would keep the memory of a context that the user
            # dropped.
            del ctx

    def drain(self) -> list[C]:
        """Stop admitting iterations, finish those in flight, and return their contexts."""
        with self:
            run = self.run
            if run is not None:
                run.read_callers_settings()
                last = None if self._passes is None else self._passes.last
                agreed = last if run.admission.source is last else None
                if agreed is None:
                    run.stop_admitting()
                else:
                    # All ranks have agreed to run the batches that this iterator pulled early, so
                    # they may not be dropped. After ``settle``, a thread that pulls has pulled
                    # equally many on all ranks.
                    run.settle()
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
        # The data may have ended before the last iteration that was admitted.
        while not run.over:
            while (error := run.admission.take_error(run.retired)) is not None:
                self._errors.append(error)
            if (ctx := self._advance(run)) is not None:
                self.drained.append(ctx)
        if self.run is run:
            self._end(run)

    def state_dict(self, check: bool) -> dict[str, int]:
        """Return the next iteration to hand out, the seed, and the count of batches pulled ahead.

        Raises:
            RuntimeError: A call is under way; or ``check`` is True and the iterations that were
                in flight last are lost.
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
                f"{self.lost or INTERRUPTED}, and their tasks may have changed what you save: "
                "resume from the last state that was saved"
            )
        if run is not None:
            number = run.iterations.first + run.retired
        # A failed ``drain`` keeps complete contexts, and its run may have dropped later ones.
        if self.drained:
            number = self.drained[0].iter_idx
        seed = self.engine.seeds.seed
        early = 0 if self._passes is None else self._passes.waiting
        return {"next_iteration": number, "in_flight": self.in_flight + early, "seed": seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore number and seed from a saved state.

        Call it in ``with`` and with nothing in flight.
        """
        for name in ("next_iteration", "seed"):
            value = state.get(name) if isinstance(state, Mapping) else None
            if type(value) is not int or (name == "next_iteration" and value < 0):
                raise ValueError(
                    f"the state's {name} is {shown(value)}: give what state_dict() returned"
                )
        self.next_iteration = state["next_iteration"]
        self.lost = ""
        self._errors.clear()
        if self._passes is not None:
            self._passes.last = None
        self.engine.seeds.seed = state["seed"]

    def drop(self) -> int:
        """Drop the iterations in flight, and return their number.

        A closed pipeline has none.
        """
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
            elif self.lost:
                # The oldest iteration failed. The next run starts after it.
                self.next_iteration = self._oldest + 1
            self._errors.clear()
            return dropped

    def refuse_in_flight(self, purpose: str) -> None:
        """Raise RuntimeError if iterations are in flight. Call it inside ``with``."""
        self._end_idle()
        if self.run is not None:
            raise RuntimeError(
                f"iterations are in flight ({self.in_flight}): finish their iterator, or call "
                f"drain(), before {purpose}"
            )

    @contextmanager
    def borrowed(self, shortcuts: Shortcuts, context: type[C]) -> Iterator[None]:
        """Use other shortcuts and contexts, and no check, in this block.

        The engine is restored after it.
        """
        engine = self.engine
        next_iteration = self.next_iteration
        self.engine = replace(engine, shortcuts=shortcuts, check=None, context=context)
        try:
            yield
        except BaseException:
            # The first failure is raised, not an error of this clean-up.
            with suppress(Exception):
                self.drain()
            raise
        finally:
            self.engine = engine
            self.next_iteration = next_iteration

    def close(self) -> None:
        """Stop the threads and drop the iterations in flight, or make the call under way do so."""
        self.access.close()
        # In a forked child, a thread that held a lock of the run does not exist, and never releases
        # it.
        if self.access.forked:
            self.run = None
        elif self.run is not None:
            self.run.stop()
        # A call under way, on any thread, ends the run when it sees ``closed``.
        if self.access.forked or self.access.enter_to_close(sys._getframe()):
            try:
                self._end_all()
            finally:
                self.access.leave()

    def _prepared(self, iterator: Iterator[Any], length: int | None = None) -> Run:
        """Return the run over this iterator, ready to be advanced by the calling thread."""
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
        """End a run that has no iterations in flight, so that the next call can begin a new one."""
        run = self.run
        if run is not None and not run.draining:
            run.settle()
        if run is not None and not run.in_flight and not run.draining:
            run.stop_admitting()
            # A failure that has not been raised keeps the run alive.
            if run.over:
                self._end(run)

    def _raise_error(self) -> None:
        """Raise the oldest due error of the iterator, if there is one."""
        if self._errors:
            error = self._errors.pop(0)
            # All ranks raise ``UnevenDataError`` by themselves; other errors are reported to them.
            if not isinstance(error, UnevenDataError):
                tell_failure(error)
            try:
                raise error
            finally:
                # The error's traceback refers to this frame, which would be a reference cycle.
                del error

    def _begin(self, iterator: Iterator[Any], length: int | None = None) -> Run:
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"progress() takes an iterator, not {type(iterator).__name__}: "
                "pass iter(loader), and the same one each time"
            )
        self.agree()
        source = iterator if self._passes is None else self._passes.source(iterator, length)
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
            # A finalizer and not ``__del__``: an exception that a signal handler raises within
            # ``__del__`` is lost.
            self._dropped = weakref.finalize(self, end_dropped, run, watchdog, self._made_at)
            self._dropped.atexit = False
        # Also after Ctrl-C, the threads that were started end.
        except BaseException:
            self._end(run)
            raise
        return run

    def begin_serial(self, number: int) -> None:
        """Record that an iteration is run serially.

        If the iteration fails, it is lost and keeps its number.
        """
        self.lost = f"iteration {number} was run serially, and has failed"
        self._oldest = number

    def agree(self) -> None:
        """Compare the plan across ranks in the first call. This is a collective."""
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
        """Return the next context, or None if there is no further one."""
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
        # Whatever a task or an interrupt raised ends the run, and goes on to the caller.
        except BaseException as error:
            for left in self._end(run):
                add_note(error, left)
            if self._passes is not None and isinstance(error, OutOfStepError):
                self._passes.out_of_step = str(error)
            tell_failure(error)
            raise
        if run.over:
            self._end(run)
        return ctx

    def _end(self, run: Run) -> list[str]:
        """End the run and return notes on tasks that have not returned. May be called again."""
        run.end()
        if self._watchdog is not None:
            # In a forked child there is no watchdog thread to stop.
            if not self.access.forked:
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
        self._failed = run.admission.iterator if run.admission.errors else None
        self.run = None
        notes = [f"swpipe: {left}; its thread ends when that returns" for left in run.left_inside()]
        while run.admission.errors:
            _, error = run.admission.errors.pop(0)
            if run.finished:
                self._errors.append(error)
            else:
                text = f"swpipe: an error of the iterator is dropped, too: {type(error).__name__}"
                notes.append(f"{text}: {error}")
        return notes

    def _end_all(self) -> None:
        self.drained.clear()
        if self.run is not None:
            self._end_with_warning(self.run)
        self._errors.clear()
        if self._passes is not None:
            self._passes.close(forked=self.access.forked)

    def _end_with_warning(self, run: Run) -> None:
        if run.flushing and run.in_flight and run.failure is None:
            text = (
                f"flush() was not iterated to its end, and {run.in_flight} pushed batches are "
                "dropped: iterate over it (for ctx in pipe.flush()), or call drain()"
            )
            warnings.warn_explicit(text, RuntimeWarning, *self._made_at)
        for left in self._end(run):
            warnings.warn_explicit(left, RuntimeWarning, *self._made_at)
