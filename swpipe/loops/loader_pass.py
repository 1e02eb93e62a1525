"""One pass over a loader: pulls batches ahead, hands them over, and knows where it is.

    loader's thread    pull 3 ....   pull 4 ....
    caller             hand out 2    body of 2: saves, or leaves     hand out 3    body of 3
    or, serially       pull 2, hand out 2           body of 2        pull 3, hand out 3

The life of a pass::

    BEGUN ── first request ──> RUNNING ── the end ───────────> ENDED
      │ no request: undone       ^  └──── break, an error ──> LEFT
                                 └── next pass of an iterator ──┘

``pass_record`` has the pulls that a check or a saved state may need, ``place_in_pass`` restores the
position of the loader. ``draws`` finds out who uses random generators, and so which pulls are
serial. ``loader_data`` checks that the loop leaves the loader's data alone. This module hands
batches over from the thread that pulls to the caller's thread.
The caller makes a serial pull itself (``take``), after the pipeline's iterator has ended.

An error of the loader, and the end of its batches, reach the caller after all earlier batches.
An iterator cannot start a second pass: batches that were pulled and not handed out are given again.

Guarantees
    - The loader is called by one thread at a time. If a pass is left during a pull, that pull ends
      before the next pull begins, and a batch of an iterator is kept.
    - The caller and the pulling thread change shared attributes under a lock, unless one thread
      alone changes them, by one assignment. No thread holds the lock while the loader is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Set
from dataclasses import replace
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import Any

from swpipe._engine.waiting import Cancelled, ProgressCounter
from swpipe.accelerate_check import PreparedCheck
from swpipe.core.loaders import are_same, read_in_pass
from swpipe.errors import add_note
from swpipe.loops.batch_memory import Contents
from swpipe.loops.pass_generators import States
from swpipe.loops.pass_record import PassRecord
from swpipe.loops.place_in_pass import begun_again
from swpipe.loops.pulled_loader import PulledLoader

_LEFT_S = 600.0
"""Seconds that a pass waits for a pull of the previous pass to return."""


class LoaderPass:
    """A pass that has begun.

    Attributes:
        running: Whether the pass is RUNNING, as drawn above; set by the loop.
        left: Whether the pass is LEFT; set by the loop.
        iterator: The remaining batches of the pass.
        pulled: The number of batches pulled in this pass.
        fed: The number of batches given to the pipeline.
        handed_out: The number of batches of this pass that the caller has received.
        ended: Whether the pass has no more batches; set by the loop.
        failure: The exception of the loader; the caller raises it at the end of the iterator.
        lost: Whether batches that were pulled ahead were dropped, and do not come again.
        had_live_workers: Whether the pass uses worker processes of an earlier pass.
        record: The pulls of the pass.

    Args:
        of: The loader, and how it is pulled.
        saved: The position in mid-pass to resume at, as returned by ``state_dict``; None for a new
            pass.
    """

    def __init__(self, of: PulledLoader, saved: Mapping[str, Any] | None = None) -> None:
        handed_out = 0 if saved is None else saved["batches"]
        self.running = False
        self.left = False
        self.pulled = handed_out
        self.fed = handed_out
        self.handed_out = handed_out
        self.ended = False
        self.failure: BaseException | None = None
        self.lost = False
        self.had_live_workers = of.has_live_workers
        self._of = of
        self.record = PassRecord(of)
        # Reentrant: a signal handler may save a state in the middle of a hand-over.
        self._lock = threading.RLock()
        self._begun = 0  # how many pulls have begun
        self._returned = ProgressCounter()  # how many of these have returned
        self._over = False  # nothing more is pulled: the pass was left, or the end was found
        self._end_is_known = False  # the loader has no more batches
        # Incremented when the pass is left: a pull for an older part is cancelled.
        self._part = 0
        self._first = 0  # the number of the iteration that has the first batch of the pass
        self._sampling: list[Any] | None = None
        of.draws.begin()
        if of.data is not None:
            of.data.begin()
        if of.times is not None:
            of.times.begin()
        if saved is None:
            self._batches = self.record.begin()
        else:
            self._batches = begun_again(of, self.record, saved)
        self._prepared = PreparedCheck(self._batches) if of.ahead else None
        self.iterator = self._pull()

    def state_dict(self, *, check: bool) -> dict[str, Any]:
        """Return the position of the pass after the last batch handed out.

        Args:
            check: Whether to add the checksums that let a resumed loop refuse different batches.
        """
        of = self._of
        with self._lock:
            # None means that no pass had begun; an empty dict, that one had begun without any pull.
            after_pull: States | None = None if self.pulled else {}
            # The generators are past the last batch if more was pulled, or if the end was found.
            if self._is_past or self._pulling:
                after_pull = of.draws.drawn(self.record.after(self.handed_out))
            state = {
                "batches": self.handed_out,
                "generators": of.generators.read(),
                "after_pull": after_pull,
                **self.record.state_dict(self.handed_out, check=check),
                **of.draws.state_dict(),
            }
        # Without the lock: a loader may take long to tell its state.
        if state["loader"] is None:
            state["loader"] = self.record.ask()
        return state

    @property
    def is_left(self) -> bool:
        """Whether the pass was left before its last batch was handed out."""
        return self.left and not self.ended

    @property
    def is_ahead(self) -> bool:
        """Whether more batches were pulled than were handed out."""
        return self.pulled > self.handed_out

    @property
    def _pulling(self) -> bool:
        return self._returned.count < self._begun

    @property
    def _is_past(self) -> bool:
        """Whether the loader is past the last batch handed out: by a batch, or by its end."""
        return self.is_ahead or self._end_is_known

    def compare_draws(self) -> None:
        """Find out who has drawn until now, before a state is saved in the body.

        Raises:
            RuntimeError: The loader and the body have drawn from the same generator.
        """
        draws = self._of.draws
        # Without a declaration, only the comparison at a pull's end tells whether it has drawn.
        if draws.compares:
            self.await_pull()
            with self._lock:
                draws.asked(self.handed_out, pulling=False, ahead=self._is_past)

    def drawn_by_others(self) -> Set[str]:
        """Return the generators that other code drew from, or may have, since the last pull ahead.

        While a batch is being pulled, only generators with an undecided use are returned.
        """
        draws = self._of.draws
        with self._lock:
            if not self._is_past:
                return frozenset()
            return draws.undecided | (frozenset() if self._pulling else draws.drawn_by_others())

    # --------------------------------------------------------------- what the caller does

    def make_ready(self) -> None:
        """Prepare for the next iteration, after the body of the previous batch has ended.

        Raises:
            RuntimeError: The loop has changed data, or drawn from a generator, that the loader has
                already used for batches ahead.
        """
        of = self._of
        with self._lock:
            self.record.end_body(self.handed_out)
            # What is read at the first request is compared later: the body may change it from now.
            if self._sampling is None:
                self._sampling = read_in_pass(of.inner)
            elif self._sampling or type(of.loader) is list:
                self._check_unchanged(self._sampling)
            of.draws.asked(self.handed_out, pulling=self._pulling, ahead=self._is_past)
            if of.draws.watches(self.handed_out + 1):
                self._check_tensors()

    def _check_tensors(self) -> None:
        """Refuse a body that has used tensors of the loader, in which the two are not in turn.

        The pull after this body is watched.
        """
        draws = self._of.draws
        used = draws.tensors.end_body()
        if draws.in_turn:
            return
        if used:
            raise RuntimeError(
                f"the loop uses a tensor that the loader writes ({used}), and the loader is "
                "ahead: it would find what a later pull has written. Let the loader hand out a "
                "copy, or do not pull it ahead"
            )
        # If the pull before the body was watched, too, only the body can have changed the tensors.
        if draws.watches(self.handed_out):
            _refuse_changed(draws.tensors.changed())

    @property
    def is_in_turn(self) -> bool:
        """Whether the caller must take the next batch itself, with no other batch in flight."""
        # Checked without the lock first: most loaders never take turns.
        if not self._wants_turn():
            return False
        with self._lock:
            # If the iterator is open, the pipeline may be about to find that it ends here.
            is_open = getgeneratorstate(self.iterator) in (GEN_RUNNING, GEN_SUSPENDED)
            return not (self.is_ahead or self._pulling or is_open) and self._wants_turn()

    def _wants_turn(self) -> bool:
        times = self._of.times
        if times is None:
            return False
        quick = times.quick or self.pulled < times.serial
        return quick or self._of.draws.wants_turn(self.pulled + 1)

    def take(self) -> Any:
        """Pull the next batch now, while nothing else of the loop runs.

        Raises:
            StopIteration: The loader has no more batches.
        """
        if self._over or not self._advance(alone=True):
            raise StopIteration
        return self._taken(self._part)

    def go_on(self) -> bool:
        """Make a new iterator after one has ended; return False at the loader's end."""
        with self._lock:
            if not self._over:
                self.iterator = self._pull()
            return not self._over

    def _check_unchanged(self, sampling: list[Any]) -> None:
        """Refuse a list or samplers that would give other batches now than were pulled ahead."""
        loader = self._of.loader
        now = read_in_pass(self._of.inner)
        part = "" if are_same(sampling, now) else "the loader's sampler or dataset"
        if type(loader) is list:
            # A list that grew or shrank after its end was found would give other batches, too.
            same = self.record.is_that_of(loader, self.handed_out)
            if not same or (self._end_is_known and len(loader) != self.pulled):
                part = "the list"
        _refuse_changed(part)

    def begin_batch(self, batch: Any, iteration: int) -> None:
        """Check that the batch of an iteration is as it was pulled, before the first task uses it.

        Raises:
            RuntimeError: The batch has changed, or the length of the loader or its dataset.
        """
        # Without the lock: an entry of the record does not change any more.
        if self._of.data is not None:
            self.record.check_as_pulled(iteration - self._first + 1, batch)
            _refuse_changed(self._of.data.changed)

    def hand_out(self) -> None:
        """Count the next batch as received by the caller, whose body begins."""
        # Without the lock: the batch stays in use until the body has ended.
        self.record.begin_body(self.handed_out + 1)
        self.handed_out += 1
        if self._of.draws.watches(self.handed_out + 1):
            self._of.draws.tensors.begin_body()

    def end(self) -> None:
        """End the pass after its last batch: check that the loader has no more, as a ``for`` would.

        Raises:
            ValueError: The loader has more batches than its length.
        """
        if not self.ended:
            self.await_pull()
            if self._of.data is not None:
                _refuse_changed(self._of.data.changed)
            if self.is_ahead or (not self._over and self._advance(alone=True)):
                raise ValueError(f"the loader has more batches than its length, {self.handed_out}")
        self.ended = True
        if self.failure is not None:
            raise self.failure

    def leave(self, *, failed: bool) -> Set[str]:
        """Leave the pass before its end; the pipeline pulls no more batches.

        A pull that is under way is the last one.

        Args:
            failed: Whether an iteration failed, so that its batch is lost.

        Returns:
            The generators that the loader has drawn from ahead, and that cannot be set back.
        """
        # The failed iteration's batch counts as handed out: a new pass must not give it again.
        if failed and self.is_ahead:
            self.hand_out()
            self._of.draws.tensors.end_body()
        with self._lock:
            self.record.leave(self.handed_out)
            self.fed = self.handed_out
            # The iterator continues in the next pass, and gives the dropped batches again. A thread
            # that still pulls for the old part is cancelled by the number of the part.
            if self._of.goes_on:
                self._part += 1
                self.iterator = self._pull()
                return self._of.draws.undecided if self._is_past else frozenset()
            self.lost = self.is_ahead or self._pulling
        return self._set_back()

    def _set_back(self) -> Set[str]:
        """Set the generators back to their states after the last batch handed out."""
        self.release()
        draws = self._of.draws
        after = self.record.after(self.handed_out)
        # If other code has drawn since, setting the generators back would repeat its draws.
        if others := self.drawn_by_others():
            return others
        # Nothing to set back if the loader draws nothing, or has pulled nothing ahead.
        if draws.names and draws.after and self._is_past:
            if unknown := draws.names - after.keys():
                return unknown
            self._of.generators.write(draws.drawn(after))
            draws.begin()
        return frozenset()

    def is_continued(self) -> bool:
        """Return whether a new pass continues this one.

        Raises:
            RuntimeError: Batches were dropped, and the loader is its own iterator; or tasks have
                modified dropped batches that the loader would give again.
        """
        if self.lost and hasattr(type(self._of.loader), "__next__"):
            raise RuntimeError(
                f"the loader ({type(self._of.loader).__name__}) is its own iterator, and batches "
                "that were pulled ahead were dropped when the last pass was left: whether a new "
                "pass begins anew or goes on is not known. Let its __iter__ be a generator, or "
                "do not pull it ahead"
            )
        self.record.check_modified()
        return self._of.goes_on and not self.ended

    def undo(self) -> None:
        """Undo a pass that has begun without any pull: release it, and set its draws back."""
        self.release()
        if not self.pulled:
            self.record.undo()

    def release(self) -> None:
        """Drop the loader's iterator, as a ``for`` does: a generator's ``finally`` runs."""
        with self._lock:
            self._batches = iter(())
            self.record.release()
            self._part += 1
            self._over = True

    def close(self) -> None:
        """Drop the loader itself, too, if it is an iterator: no other pass can follow."""
        self.release()
        self._of = replace(self._of, loader=())
        self.record = PassRecord(self._of)

    def begin(self, iteration: int) -> None:
        """Prepare the pass to give batches, also if it was left before.

        A pull that was under way when the pass was left has ended on return, and its batch is kept
        or dropped.

        Args:
            iteration: The number of the next iteration.
        """
        self._first = iteration - self.handed_out
        if self.pulled:
            self.await_pull()

    def await_pull(self) -> None:
        """Wait until no batch is being pulled.

        Raises:
            RuntimeError: The loader has not returned within ``_LEFT_S`` seconds.
        """
        if not self._returned.reaches(self._begun, _LEFT_S):
            raise RuntimeError(
                f"the loader ({type(self._of.loader).__name__}) has not returned for "
                f"{_LEFT_S:.0f} s from a pull for the pass before, which was left"
            )

    # --------------------------------------------------------------- what the pulling thread does

    def pull_first_alone(self) -> None:
        """Pull the first two batches of the pass, while nothing else runs."""
        while self.pulled < 2 and not self._over and self._advance(alone=True):
            pass

    def _pull(self) -> Generator[Any, None, None]:
        part = self._part
        while True:
            if self._pulling:  # for the previous part of the pass, which was left
                self.await_pull()
            waiting = self.pulled > self.fed
            if not waiting and (self._over or self._wants_turn() or not self._advance()):
                return
            yield self._taken(part)  # no local variable: this frame must not keep the batch

    def _taken(self, part: int) -> Any:
        """Return the oldest batch that was pulled and not yet given to the pipeline."""
        with self._lock:
            # The pass was left between the pull and here: the batch belongs to the new iterator.
            if part != self._part:
                raise Cancelled
            self.fed += 1
            return self.record.give(self.fed)

    def _advance(self, *, alone: bool = False) -> bool:
        """Pull the next batch, and return whether there was one."""
        of = self._of
        number = self.pulled + 1
        alone = alone or not of.ahead
        with self._lock:
            if self._over:  # released after the thread had looked
                raise Cancelled
            in_use = self.record.in_use
            before = of.draws.before_pull(number, self.handed_out, alone=alone)
            self._begun += 1
        # The lock is not held here: a save or a break must not wait for a slow loader.
        begin_s = time.perf_counter()
        try:
            return self._called(number, before, in_use, alone=alone)
        finally:
            if of.times is not None:
                of.times.note(begin_s, alone=alone, waited=alone and of.draws.in_turn)
            # In a finally block, because await_pull() would otherwise wait for a failed pull.
            self._returned.advance(self._begun)

    def _called(self, number: int, before: States, in_use: list[Contents], *, alone: bool) -> bool:
        """Call the loader for one batch, and note what the call did."""
        of = self._of
        draws = of.draws
        failure: BaseException | None = None
        batch = None
        pull = None
        data = None if draws.in_turn else of.data
        if data is not None:
            data.before_pull()
        try:
            if draws.watches(number):
                with draws.watching(number):
                    batch = next(self._batches)
            else:
                batch = next(self._batches)
        except StopIteration:
            pass
        except (KeyboardInterrupt, Cancelled):
            # An interrupted pull does not count, so its draws are undone.
            of.generators.write(draws.drawn(before))
            raise
        except BaseException as error:  # noqa: BLE001 - raised after all earlier batches
            add_note(error, f"swpipe: raised by the pull of batch {self.pulled} of the pass")
            failure = error
        else:
            # This may take a while, and the caller must not wait: without the lock.
            pull = self.record.entry(number, batch, before)
        if self._prepared is not None:
            self._prepared.after_pull()
            self._prepared = None  # only the first pull is checked
        if data is not None:
            data.after_pull()
        with self._lock:
            draws.after_pull(number, before, alone=alone, batch=batch)
            if self._over:  # released during the pull
                return False
            if pull is None:
                self.failure = failure
                self._batches = iter(())
                self._over = True
                self._end_is_known = failure is None
                return False
            pull.after = draws.after
            self.record.add(number, pull, in_use, self.handed_out)
            self.pulled = number
            return True


def _refuse_changed(part: str) -> None:
    if part:
        raise RuntimeError(
            f"the loop has changed {part} while batches were pulled ahead: a plain loop "
            "would get others now. Change it between two passes, or do not pull the "
            "loader ahead"
        )
