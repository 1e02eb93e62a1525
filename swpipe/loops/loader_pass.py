"""One pass over a loader: what it pulls ahead, where it is, and how to get there again.

    loader's thread    pull 3 ....   pull 4 ....
    caller             hand out 2    body of 2: saves, or leaves     hand out 3

Its jobs: ``place_in_pass``, where it is and how it is led there again; ``loader_draws`` and
``draw_views``, who draws random numbers; ``pull_watch``, what others change that the loader reads;
``batches_ahead``, whether batches stay as they were pulled; and here, the hand-over between the
thread that pulls and the caller's.

An error of the loader, and the end of its batches, come when the caller has got the batches before.
An iterator has no other pass: batches that were pulled and not handed out are given again.

Guarantees
    - The loader is called by one thread at a time: a pass that is left while a batch is pulled ends
      its pull before the next one begins, and a batch of an iterator is kept.
    - What the caller does and what the pull notes changes under a lock, which nobody has while the
      loader is called.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from swpipe._engine.waiting import Cancelled
from swpipe.accelerate_check import PreparedCheck
from swpipe.core.loaders import are_same, read_in_pass
from swpipe.errors import add_note
from swpipe.loops.batches_ahead import BatchesAhead
from swpipe.loops.draw_views import Turns
from swpipe.loops.live_loaders import goes_on, has_live_workers, torchs
from swpipe.loops.loader_draws import LoaderDraws
from swpipe.loops.pass_generators import PassGenerators, States, changed
from swpipe.loops.place_in_pass import PlacesPulled
from swpipe.loops.pull_watch import PullWatch

_LEFT_S = 600.0
"""How long a pass waits for a batch that is being pulled for the pass before."""


@dataclass(frozen=True, slots=True)
class PulledLoader:
    """A loader, and how its passes are pulled.

    Attributes:
        loader: The loader.
        generators: The random generators that matter.
        draws: What it draws in mid-pass.
        ahead: Whether batches are pulled while earlier ones are in use.
        most: How many of these are looked at, or may be given again.
        turns: Of the pipeline, where a thread of its own pulls while the loop's body runs.
        watch: Watches pulls that are made ahead, where its code in this process makes the batches.
    """

    loader: Any
    generators: PassGenerators
    draws: LoaderDraws
    ahead: bool
    most: int = 0
    turns: Turns | None = None
    watch: PullWatch | None = None


class LoaderPass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches.
        pulled: How many batches were pulled of this pass.
        fed: How many of these the pipeline was given.
        handed_out: How many batches the caller got of this pass.
        ended: There are no more; the caller says so.
        failure: What the loader raised; the caller raises it at the end of the iterator.
        lost: Whether batches that were pulled ahead were dropped.
        had_live_workers: Whether it has worker processes of an earlier pass.

    Args:
        of: The loader, and how it is pulled.
        saved: Where to go on in mid-pass, as ``state_dict`` returned it; None for a new pass.
    """

    def __init__(self, of: PulledLoader, saved: Mapping[str, Any] | None = None) -> None:
        self._of = of
        self.had_live_workers = has_live_workers(of.loader)
        self._places = PlacesPulled(of.loader)
        self._ahead = BatchesAhead(of.loader, made_here=of.watch is not None, most=of.most)
        self._again: deque[Any] = deque()
        self._lock = threading.RLock()  # a condition takes and gives it in more steps
        self._pulled_last = threading.Condition(self._lock)
        self._pulling = self._left = self.lost = False
        self._part = 0  # how often it was left, and gone on with
        self._asked = self._at_end = self._end_is_known = self.ended = False
        self.failure: BaseException | None = None
        self.handed_out = self.pulled = self.fed = 0 if saved is None else saved["batches"]
        of.draws.begin()
        if of.watch is not None:
            of.watch.begin()
        if saved is None:
            self._at_start = of.generators.read()
            self._batches, self._loader_at_start = self._places.begin()
        else:
            self._at_start, self._loader_at_start = saved["at_start"], saved["loader_at_start"]
            self._batches = self._places.begin_again(of.generators, saved)
        self._prepared = PreparedCheck(self._batches) if of.ahead else None
        self._when_begun = of.generators.read()
        self._sampling: list[Any] | None = None
        self._is_own_iterator = self._batches is of.loader
        self.iterator = self._pull()

    def state_dict(self, *, check: bool) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out."""
        of = self._of
        with self._lock:
            handed_out = self.handed_out
            ahead = max(0, self.pulled - handed_out)
            draws = ahead or self._pulling or self._end_is_known
        places = self._places.up_to(handed_out)
        after_pull: States | None = None if self.pulled else {}  # a pass has begun, and no more
        if places and draws:
            after_pull = of.draws.drawn(places[-1].after)
        loader = places[0].loader if places else self._loader_at_start
        again = [(one.before, one.checksum) for one in places if one.before is not None]
        return {
            "batches": handed_out,
            "at_start": self._at_start,
            "generators": of.generators.read(),
            "loader": self._places.ask() if loader is None else loader,
            "loader_at_start": self._loader_at_start,
            "again": [(before, checksum if check else None) for before, checksum in again],
            "after_pull": after_pull,
            "loader_draws": sorted(of.draws.names),
            "ahead": ahead,
        }

    @property
    def is_ahead(self) -> bool:
        """Whether more was pulled than was handed out."""
        return self.pulled > self.handed_out

    def drawn_by_others(self) -> frozenset[str]:
        """Generators that others have drawn from since the last pull, which drew ahead of them.

        While a batch is pulled it is not known.
        """
        with self._lock:
            known = self.is_ahead and not self._pulling
            return self._of.draws.drawn_by_others() if known else frozenset()

    # --------------------------------------------------------------- what the caller does

    def make_ready(self) -> None:
        """The caller asks for one iteration more."""
        with self._lock:
            if self._sampling is None:
                self._sampling = read_in_pass(torchs(self._of.loader))
            elif self._sampling or type(self._of.loader) is list:
                self._check_unchanged(self._sampling)
            if self._of.draws.names and self.is_ahead and not self._pulling:
                self._of.draws.check_others()

    def _check_unchanged(self, sampling: list[Any]) -> None:
        """Refuse a list, or samplers, that would now give other batches than were pulled ahead."""
        loader = self._of.loader
        now = read_in_pass(torchs(loader))
        changed = "" if are_same(sampling, now) else "the loader's sampler or dataset"
        if type(loader) is list:
            same = self._ahead.are_those_of(loader, self.handed_out)
            if not same or (self._at_end and len(loader) != self.pulled):
                changed = "the list"
        _refuse_changed(changed)

    def begin_batch(self) -> None:
        """The caller's tasks come to the next batch, or all of its batches were handed out."""
        if self._of.watch is not None:
            _refuse_changed(self._of.watch.begin_batch(self.handed_out + 1))

    def hand_out(self) -> None:
        """The caller gets the next batch."""
        with self._lock:
            self.handed_out += 1
            self._ahead.hand_out()

    def end(self) -> None:
        """The caller got the last batch, and asks for no more: ask the loader, as a for would."""
        if not self.ended:
            if self._of.turns is not None:
                self._of.turns.settle()
                self.begin_batch()
            if self.is_ahead or any(True for _ in self._pull()):
                raise ValueError(f"the loader has more batches than its length, {self.handed_out}")
        self.ended = True
        if self.failure is not None:
            raise self.failure

    def leave(self, *, failed: bool) -> frozenset[str]:
        """The caller leaves the pass before its end; the pipeline pulls no more.

        A batch that is being pulled is the last one.

        Args:
            failed: In the middle of an iteration, whose batch is lost.

        Returns:
            Generators that the loader has drawn from ahead, and that cannot be set back.
        """
        if failed and self.is_ahead:
            self.hand_out()
        with self._lock:
            kept = self._ahead.leave(self.pulled - self.handed_out)
            if goes_on(self._of.loader):
                self._part += 1
                self._again = deque(kept)
                self.iterator = self._pull()
                return frozenset()
            self.lost = self.is_ahead or self._pulling
        return self._set_back()

    def _set_back(self) -> frozenset[str]:
        """Set the generators back to what they were after the last batch handed out."""
        self.release()
        places, draws = self._places.up_to(self.handed_out), self._of.draws
        after = places[-1].after if places else {}
        if not (draws.names and draws.after and (self.is_ahead or self._end_is_known)):
            return frozenset()
        if others := self.drawn_by_others() or (draws.names - after.keys()):
            return others
        self._of.generators.write(draws.drawn(after))
        draws.begin()
        return frozenset()

    def goes_on(self) -> bool:
        """Whether a new pass is the rest of this one."""
        loader = self._of.loader
        if self.lost and self._is_own_iterator:
            raise RuntimeError(
                f"the loader ({type(loader).__name__}) is its own iterator, and batches "
                "that were pulled ahead were dropped when the last pass was left: whether a new "
                "pass begins anew or goes on is not known. Let its __iter__ be a generator, or "
                "do not pull it ahead"
            )
        self.check_modified()
        return goes_on(loader) and not self.ended

    def check_modified(self) -> None:
        """Refuse to go on where the loader may give batches again that were dropped."""
        self._ahead.check_modified()

    def undo(self) -> None:
        """Forget a pass that has begun and was not asked for anything, and what it has drawn."""
        self.release()
        generators = self._of.generators
        if not (self.pulled or changed(self._when_begun, generators.read())):
            generators.write(self._at_start)

    def release(self) -> None:
        """Let the loader's iterator go, as a for does: a generator's ``finally`` runs."""
        with self._lock:
            self._left = True
            self._batches = iter(())
            self._again.clear()
            self._ahead.clear()
            self._at_end = True

    def close(self) -> None:
        """Let an iterator that was given go, too; there is no other pass."""
        self.release()
        self._of, self._places = replace(self._of, loader=()), PlacesPulled(())

    def await_pull(self) -> None:
        """Wait until no batch is being pulled any more."""
        with self._lock:
            if not self._pulled_last.wait_for(lambda: not self._pulling, _LEFT_S):
                raise RuntimeError(
                    f"the loader ({type(self._of.loader).__name__}) has not returned for "
                    f"{_LEFT_S:.0f} s from a pull for the pass before, which was left"
                )

    # --------------------------------------------------------------- what the pulling thread does

    def pull_alone(self, most: int) -> None:
        """Pull so many batches in all now, while nothing else runs."""
        while self.pulled < most and not self._at_end and self._advance(alone=True):
            pass

    def _pull(self) -> Iterator[Any]:
        current = self._part
        while True:
            if self._pulling:  # for the part before, which was left
                self.await_pull()
            if not self._again and (self._at_end or not self._advance()):
                return
            yield self._taken(current)  # this frame must not keep it

    def _taken(self, part: int) -> Any:
        """The next batch that was pulled."""
        with self._lock:
            if part != self._part:
                raise Cancelled
            self.fed += 1
            return self._again.popleft()

    def _advance(self, *, alone: bool = False) -> bool:
        """Pull the next batch; whether there is one."""
        of, number = self._of, self.pulled + 1
        if (of.turns is not None or not of.ahead) and of.draws.wants_turn(number):
            alone = True
            if of.turns is not None:
                of.turns.await_turn()
        with self._lock:
            if self._left:
                raise Cancelled
            ahead = of.turns is not None and self.is_ahead
            before = of.draws.before_pull(alone=alone, ahead=ahead)
            self._pulling = True
        try:
            return self._called(number, before, alone)
        finally:
            with self._lock:
                self._pulling = False
                self._pulled_last.notify_all()

    def _called(self, number: int, before: States, alone: bool) -> bool:
        """Call the loader, and note what it did."""
        of, failure, ended, batch = self._of, None, False, None
        try:
            # Where all pulls are in turn nothing can change meanwhile.
            watch = None if of.draws.known.shared else of.watch
            with nullcontext() if watch is None else watch.pull(number):
                batch = next(self._batches)
        except StopIteration:
            ended = True
        except (KeyboardInterrupt, Cancelled):
            of.generators.write(of.draws.drawn(before))  # the pull that is cut short was none
            raise
        except BaseException as error:  # noqa: BLE001 - raised when those before are handed out
            add_note(error, f"swpipe: raised by the pull of batch {self.pulled} of the pass")
            failure, ended = error, True
        # At the end samplers may draw once more.
        found = self._note_draws(number, before, alone or (ended and failure is None))
        if of.watch is not None:
            _refuse_changed(of.watch.changed)
        pulled = None if ended else self._ahead.as_pulled(batch)
        if not ended:  # it may take a while, and the caller must not wait for it
            after = of.draws.after if before else {}
            self._places.note(number, self.handed_out, batch, found, after)
        with self._lock:
            if ended and not self._left:
                self.failure, self._batches, self._at_end = failure, iter(()), True
                self._end_is_known = failure is None
            if ended or self._left:
                return False
            self._ahead.add(pulled)
            self.pulled = number
            self._again.append(batch)
            return True

    def _note_draws(self, number: int, before: States, alone: bool) -> States:
        """Note what a pull has drawn; returns the states in which it found the generators."""
        of = self._of
        found = States() if of.watch is None else of.watch.views.pulled(number)
        of.draws.after_pull(number, before, alone=alone and self._asked, seen=bool(found))
        if self._prepared is not None and not self._asked:
            self._prepared.after_pull()
        self._asked = True
        return {**before, **found}


def _refuse_changed(changed: str) -> None:
    if changed:
        raise RuntimeError(
            f"the loop has changed {changed} while batches were pulled ahead: a plain loop "
            "would get others now. Change it between two passes, or do not pull the "
            "loader ahead"
        )
