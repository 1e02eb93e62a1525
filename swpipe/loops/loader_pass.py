"""One pass over a loader: pulls batches ahead, hands them over, and knows where it is.

    loader's thread    pull 3 ....   pull 4 ....
    caller             hand out 2    body of 2: saves, or leaves     hand out 3    body of 3
    or, serially       pull 2, hand out 2           body of 2        pull 3, hand out 3

The life of a pass; RUNNING is the one that the loop holds as ``_running``::

    BEGUN ── first request ──> RUNNING ── the end ───────────> ENDED    ``ended``
      │ no request: undone       ^  └──── break, an error ──> LEFT      ``left``
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
from typing import Any

from swpipe._engine.waiting import Cancelled, ProgressCounter
from swpipe.accelerate_check import PreparedCheck
from swpipe.core.loaders import are_same, read_in_pass
from swpipe.errors import add_note
from swpipe.loops.pass_generators import States
from swpipe.loops.pass_record import PassRecord, Pull
from swpipe.loops.place_in_pass import begun_again
from swpipe.loops.pulled_loader import PulledLoader

_LEFT_S = 600.0
"""Seconds that a pass waits for a pull of the previous pass to return."""


class LoaderPass:
    """A pass that has begun.

    Attributes:
        left: Whether the pass is LEFT, as drawn above; set by the loop.
        ended: Whether the pass is ENDED, or was left in the body of its last batch; set by the
            loop.
        iterator: The remaining batches of the pass.
        fed: The number of batches given to the pipeline.
        handed_out: The number of batches of this pass that the caller has received.
        failure: The exception of the loader; the caller raises it at the end of the iterator.
        record: The pulls of the pass.

    Args:
        of: The loader, and how it is pulled.
        saved: The position in mid-pass to resume at, as returned by ``state_dict``; None for a new
            pass.
    """

    def __init__(self, of: PulledLoader, saved: Mapping[str, Any] | None = None) -> None:
        handed_out = 0 if saved is None else saved["batches"]
        self.left = False
        self.ended = False
        self.fed = handed_out
        self.handed_out = handed_out
        self.failure: BaseException | None = None
        self.record = PassRecord(of)
        self._of = of
        # Reentrant: a signal handler may save a state in the middle of a hand-over.
        self._lock = threading.RLock()
        self._begun = 0  # how many pulls have begun
        self._returned = ProgressCounter()  # how many of these have returned
        # None while batches may come; True at the loader's end; False if nothing more is pulled
        # since the loader has failed, or the pass was left.
        self._at_end: bool | None = None
        # Incremented when the pass is left: a pull for an older part is cancelled.
        self._part = 0
        for part in (of.draws, of.data, of.times):
            if part is not None:
                part.begin()
        record = self.record
        self._batches = record.begin() if saved is None else begun_again(of, record, saved)
        self.iterator: Any = self._pull()

    def state_dict(self, *, check: bool) -> dict[str, Any]:
        """Return the position of the pass after the last batch handed out.

        Args:
            check: Whether to add the checksums that let a resumed loop refuse different batches.
        """
        of = self._of
        with self._lock:
            # None means that no pass had begun; an empty dict, that one had begun without any pull.
            after_pull: States | None = None if self.record.last else {}
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
        return self.record.last > self.handed_out

    @property
    def _pulling(self) -> bool:
        return self._returned.count < self._begun

    @property
    def _is_past(self) -> bool:
        """Whether the loader is past the last batch handed out: by a batch, or by its end."""
        return self.is_ahead or self._at_end is True

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
        draws = self._of.draws
        with self._lock:
            self.record.end_body(self.handed_out)
            if self.record.sampling or type(self._of.loader) is list:
                self._check_unchanged()
            draws.asked(self.handed_out, pulling=self._pulling, ahead=self._is_past)
            # The body before a watched pull is watched, too.
            if not draws.watches(self.handed_out + 1):
                return
            used = draws.tensors.end_body()
            # In turn with the loader, it may use any tensor.
            if used and not draws.in_turn:
                raise RuntimeError(
                    f"the loop uses a tensor that the loader writes ({used}), and the loader is "
                    "ahead: it would find what a later pull has written. Let the loader hand out a "
                    "copy, or do not pull it ahead"
                )
            # If the pull before the body was watched, too, only the body can have changed them.
            if draws.watches(self.handed_out) and not draws.in_turn:
                _refuse_changed(draws.tensors.changed())

    @property
    def is_in_turn(self) -> bool:
        """Whether the caller must take the next batch itself, with no other batch in flight."""
        # Checked without the lock first: most loaders never take turns.
        if not self._wants_turn():
            return False
        with self._lock:
            # If the iterator is open, the pipeline may be about to find that it ends here.
            is_open = self.iterator.gi_running or self.iterator.gi_suspended
            return not (self.is_ahead or self._pulling or is_open) and self._wants_turn()

    def _wants_turn(self) -> bool:
        times = self._of.times
        if times is None:
            return False
        pulled = self.record.last
        return times.quick or pulled < times.serial or self._of.draws.wants_turn(pulled + 1)

    def take(self) -> Any:
        """Pull the next batch now, while nothing else of the loop runs.

        Raises:
            StopIteration: The loader has no more batches.
        """
        if not self._advance(alone=True):
            raise StopIteration
        return self._taken(self._part)

    def go_on(self) -> bool:
        """Make a new iterator after one has ended; return False at the loader's end."""
        self.iterator = self._pull()
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._at_end is not None

    def _check_unchanged(self) -> None:
        """Refuse a list or samplers that would give other batches now than were pulled ahead."""
        loader = self._of.loader
        same = are_same(self.record.sampling, read_in_pass(self._of.inner))
        part = "" if same else "the loader's sampler or dataset"
        if type(loader) is list:
            ahead = [pull.batch for pull in self.record.ahead(self.handed_out)]
            same = are_same(ahead, loader[self.handed_out : self.handed_out + len(ahead)])
            # A list that grew or shrank after its end was found would give other batches, too.
            if not same or (self._at_end and len(loader) != self.record.last):
                part = "the list"
        _refuse_changed(part)

    def begin_batch(self, batch: Any, iteration: int) -> None:
        """Check that the batch of an iteration is as it was pulled, before the first task uses it.

        Raises:
            RuntimeError: The batch has changed, or the length of the loader or its dataset.
        """
        # Without the lock: an entry of the record does not change any more.
        if self._of.data is not None:
            self.record.check_as_pulled(iteration, batch)
            _refuse_changed(self._of.data.changed)

    def hand_out(self) -> None:
        """Count the next batch as received by the caller, whose body begins."""
        # Without the lock: the batch stays in use until the body has ended.
        self.handed_out += 1
        self.record.begin_body(self.handed_out)
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
            if self.is_ahead or self._advance(alone=True):
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
        draws = self._of.draws
        # The failed iteration's batch counts as handed out: a new pass must not give it again.
        if failed and self.is_ahead:
            self.hand_out()
            draws.tensors.end_body()
        with self._lock:
            self.record.leave(self.handed_out)
            self.fed = self.handed_out
            # The iterator continues in the next pass, and gives the dropped batches again. A thread
            # that still pulls for the old part is cancelled by the number of the part.
            if self._of.goes_on:
                self._part += 1
                self.iterator = self._pull()
                return draws.undecided if self._is_past else frozenset()
            self.record.lost = self.is_ahead or self._pulling
        self.release()
        # Set the generators back to their states after the last batch handed out.
        after = self.record.after(self.handed_out)
        # If other code has drawn since, setting the generators back would repeat its draws.
        if others := self.drawn_by_others():
            return others
        # Nothing to set back if nothing was pulled ahead.
        if draws.after and self._is_past:
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
        if self.record.lost and hasattr(type(self._of.loader), "__next__"):
            raise RuntimeError(
                f"the loader ({type(self._of.loader).__name__}) is its own iterator, and batches "
                "that were pulled ahead were dropped when the last pass was left: whether a new "
                "pass begins anew or goes on is not known. Let its __iter__ be a generator, or "
                "do not pull it ahead"
            )
        self.record.check_modified()
        return self._of.goes_on and not self.ended

    def release(self) -> None:
        """Drop the loader's iterator, as a ``for`` does: a generator's ``finally`` runs."""
        with self._lock:
            self._batches = iter(())
            self.record.release()
            self._part += 1
            self._at_end = self._at_end is True

    def begin(self, iteration: int) -> None:
        """Prepare the pass to give batches, also if it was left before.

        A pull that was under way when the pass was left has ended on return, and its batch is kept
        or dropped.

        Args:
            iteration: The number of the next iteration.
        """
        self.record.first = iteration - self.handed_out
        # What samplers read is compared at each later request.
        self.record.sampling = read_in_pass(self._of.inner)
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
        """Pull the first two batches of a pass that is ahead, while nothing else runs."""
        while self._of.ahead and self.record.last < 2 and self._advance(alone=True):
            pass

    def _pull(self) -> Generator[Any, None, None]:
        part = self._part
        while True:
            if self._pulling:  # for the previous part of the pass, which was left
                self.await_pull()
            waiting = self.record.last > self.fed
            if not waiting and (self._wants_turn() or not self._advance()):
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
        draws = of.draws
        alone = alone or not of.ahead
        with self._lock:
            if self._is_over():
                return False
            number = self.record.last + 1
            handed_out = self.handed_out
            in_use = self.record.in_use
            before = draws.before_pull(number, handed_out, alone=alone)
            self._begun += 1
        # The lock is not held here: a save or a break must not wait for a slow loader.
        begin_s = time.perf_counter()
        try:
            pull = self._called(number, before)
            with self._lock:
                draws.after_pull(number, before, handed_out, alone=alone, batch=pull and pull.batch)
                if self._is_over():  # released during the pull
                    return False
                if pull is None:
                    self._batches = iter(())
                    self._at_end = self.failure is None
                    return False
                pull.after = draws.after
                self.record.add(number, pull, in_use, self.handed_out)
                return True
        finally:
            if of.times is not None:
                of.times.note(begin_s, alone=alone, waited=alone and draws.in_turn)
            # In a finally block, because await_pull() would otherwise wait for a failed pull.
            self._returned.advance(self._begun)

    def _called(self, number: int, before: States) -> Pull | None:
        """Call the loader for one batch; return None if it has no more, or has failed."""
        of = self._of
        draws = of.draws
        pull = None
        data = None if draws.in_turn else of.data
        # Only the first pull is checked.
        prepared = PreparedCheck(self._batches) if number == 1 and of.ahead else None
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
            add_note(error, f"swpipe: raised by the pull of batch {number - 1} of the pass")
            self.failure = error
        else:
            # This may take a while, and the caller must not wait: without the lock.
            pull = self.record.entry(number, batch, before)
        if prepared is not None:
            prepared.after_pull()
        if data is not None:
            data.after_pull()
        return pull


def _refuse_changed(part: str) -> None:
    if part:
        raise RuntimeError(
            f"the loop has changed {part} while batches were pulled ahead: a plain loop "
            "would get others now. Change it between two passes, or do not pull the "
            "loader ahead"
        )
