"""One pass over a loader: what it pulls ahead, where it is, and how to get there again.

    loader's thread    pull 3 ....   pull 4 ....
    caller             hand out 2    body of 2: saves, or leaves     hand out 3    body of 3
    or, in turn        pull 2, hand out 2           body of 2        pull 3, hand out 3

Its jobs: ``place_in_pass``, where it is and how it is led there again; ``draws``, who uses random
generators, and so which pulls are made in turn; ``loader_data``, what nobody else may change;
``batches_ahead``, whether batches stay as they were pulled; and here, the hand-over between the
thread that pulls and the caller's.
A pull in turn is made by the caller (``take``): the iterator that the pipeline has ends before it.

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
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swpipe._engine.waiting import Cancelled
from swpipe.accelerate_check import PreparedCheck
from swpipe.core.loaders import are_same, read_in_pass
from swpipe.errors import add_note
from swpipe.loops.batch_memory import Parts
from swpipe.loops.batches_ahead import BatchesAhead
from swpipe.loops.draws import LoaderDraws
from swpipe.loops.first_pass import FirstPass
from swpipe.loops.live_loaders import goes_on, has_live_workers, torchs
from swpipe.loops.loader_data import LoaderData
from swpipe.loops.pass_generators import PassGenerators, States, changed
from swpipe.loops.place_in_pass import PlacesPulled
from swpipe.loops.pulled_tensors import BodyUse

_LEFT_S = 600.0
"""How long a pass waits for a batch that is being pulled for the pass before."""


@dataclass(frozen=True, slots=True)
class PulledLoader:
    """A loader, and how its passes are pulled.

    Attributes:
        loader: The loader.
        generators: The random generators that matter.
        draws: Who uses these.
        ahead: Whether batches are pulled while earlier ones are in use.
        most: How many of these are looked at, or may be given again.
        beside: Whether they are pulled while the loop's body runs.
        data: Its data, where its code in this process makes batches beside the body.
    """

    loader: Any
    generators: PassGenerators
    draws: LoaderDraws
    ahead: bool
    most: int = 0
    beside: bool = False
    data: LoaderData | None = None


class LoaderPass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches.
        pulled: How many batches were pulled of this pass.
        fed: How many of these the pipeline was given.
        handed_out: How many batches the caller got of this pass.
        ended: There are no more; the caller says so.
        first: Counts the pulls, if it is a loop's first.
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
        self._ahead = BatchesAhead(of.loader, made_here=of.data is not None, most=of.most)
        self._again: deque[Any] = deque()
        self._lock = threading.RLock()  # a condition takes and gives it in more steps
        self._pulled_last = threading.Condition(self._lock)
        self._pulling = self.lost = False
        self._use: BodyUse | None = None
        self._first = 0
        self._open = False  # the pipeline asks the iterator
        self.first: FirstPass | None = None
        self._part = 0  # how often it was left, and gone on with
        self._at_end = self._end_is_known = self.ended = False
        self.failure: BaseException | None = None
        self.handed_out = self.pulled = self.fed = 0 if saved is None else saved["batches"]
        of.draws.begin()
        if of.data is not None:
            of.data.begin()
        if saved is None:
            self._at_start = of.generators.read()
            self._batches, self._loader_at_start = self._places.begin()
        else:
            self._at_start = saved["at_start"]
            self._loader_at_start = saved["loader_at_start"]
            self._batches = self._places.begin_again(of.generators, saved)
        self._prepared = PreparedCheck(self._batches) if of.ahead else None
        self._when_begun = of.generators.read()
        self._sampling: list[Any] | None = None
        self._is_own_iterator = self._batches is of.loader
        self.iterator = self._pull()

    def state_dict(self, *, check: bool) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out."""
        of = self._of
        if of.beside and of.draws.compares:
            self.await_pull()
        with self._lock:
            handed_out = self.handed_out
            ahead = max(0, self.pulled - handed_out)
            draws = ahead or self._pulling or self._end_is_known
            in_turn = of.draws.in_turn
        places = self._places.up_to(handed_out)
        after_pull: States | None = None if self.pulled else {}  # a pass has begun, and no more
        if places and draws:
            after_pull = of.draws.drawn(places[-1].after)
        loader = places[0].loader if places else self._loader_at_start
        again = self._places.again(handed_out)
        coming = self._places.coming(handed_out, of.most if of.beside else 0)
        return {
            "batches": handed_out,
            "at_start": self._at_start,
            "generators": of.generators.read(),
            "loader": self._places.ask() if loader is None else loader,
            "loader_at_start": self._loader_at_start,
            "again": [(before, checksum if check else None) for before, checksum in again],
            "after_pull": after_pull,
            "loader_draws": sorted(of.draws.names),
            "in_turn": in_turn,
            "coming": coming if check else [],
        }

    @property
    def is_ahead(self) -> bool:
        """Whether more was pulled than was handed out."""
        return self.pulled > self.handed_out

    def drawn_by_others(self) -> frozenset[str]:
        """Generators that others have drawn from since the last pull, which drew ahead of them.

        While a batch is pulled it is not known.
        """
        draws = self._of.draws
        with self._lock:
            known = self.is_ahead and not self._pulling
            untold = draws.untold_after(self.handed_out)
            return untold | (draws.drawn_by_others() if known else frozenset())

    # --------------------------------------------------------------- what the caller does

    def make_ready(self) -> None:
        """The caller asks for one iteration more: the body of the one before has ended.

        Raises:
            RuntimeError: The loop has changed, or drawn, what the loader has pulled ahead by.
        """
        of = self._of
        with self._lock:
            self._ahead.end_body()
            if self._sampling is None:
                self._sampling = read_in_pass(torchs(of.loader))
            elif self._sampling or type(of.loader) is list:
                self._check_unchanged(self._sampling)
            if of.beside:
                of.draws.asked(self.handed_out, pulling=self._pulling)
                self._end_body()

    def begin_body(self) -> None:
        """The caller gets a batch; whether it uses what pulls write is seen in watched ones."""
        tensors = self._of.draws.tensors
        if tensors.written and self._of.draws.watches(self.handed_out + 1):
            self._use = BodyUse(tensors.written)
            self._use.begin()

    def _end_body(self) -> None:
        use = self._use
        self.stop_watching()
        if use is not None and use.found:
            raise RuntimeError(
                f"the loop uses a tensor that the loader writes ({use.found}), and the loader is "
                "ahead: it would find what a later pull has written. Let the loader hand out a "
                "copy, or do not pull it ahead"
            )
        draws = self._of.draws
        if draws.watches(self.pulled) and draws.watches(self.pulled + 1):
            _refuse_changed(draws.tensors.changed())

    def stop_watching(self) -> None:
        """The body has ended, or the pass is left."""
        if self._use is not None:
            self._use.end()
            self._use = None

    @property
    def is_in_turn(self) -> bool:
        """Whether the next batch is to be taken by the caller; no other is in flight then."""
        if not self._wants_turn():
            return False
        with self._lock:
            # The pipeline may be about to find that its iterator ends here.
            ahead = self.is_ahead or self._pulling or self._again or self._open
            return not ahead and self._wants_turn()

    def _wants_turn(self) -> bool:
        return self._of.beside and self._of.draws.wants_turn(self.pulled + 1)

    def take(self) -> Any:
        """Pull the next batch now, while nothing else of the loop runs.

        Raises:
            StopIteration: There is none.
        """
        if self._at_end or not self._advance(alone=True):
            raise StopIteration
        return self._taken(self._part)

    def go_on(self) -> bool:
        """The iterator has ended: whether there are more batches, in turn or by another one."""
        with self._lock:
            if self._at_end:
                return False
            self.iterator = self._pull()
            return True

    def _check_unchanged(self, sampling: list[Any]) -> None:
        """Refuse a list, or samplers, that would now give other batches than were pulled ahead."""
        loader = self._of.loader
        now = read_in_pass(torchs(loader))
        changed = "" if are_same(sampling, now) else "the loader's sampler or dataset"
        if type(loader) is list:
            same = self._ahead.are_those_of(loader, self.handed_out)
            if not same or (self._end_is_known and len(loader) != self.pulled):
                changed = "the list"
        _refuse_changed(changed)

    def begin_batch(self, batch: Any, iteration: int) -> None:
        """The first task comes to the batch of an iteration: it must be as it was pulled.

        Raises:
            RuntimeError: It is not, or a length was changed.
        """
        if self._of.data is not None:
            with self._lock:
                self._ahead.check_as_pulled(batch, iteration - self._first + 1)
                self._check_data()

    def _check_data(self) -> None:
        if self._of.data is not None:
            _refuse_changed(self._of.data.changed)

    def hand_out(self) -> None:
        """The caller gets the next batch."""
        with self._lock:
            self.handed_out += 1
            self._ahead.hand_out()

    def end(self) -> None:
        """The caller got the last batch, and asks for no more: ask the loader, as a for would."""
        if not self.ended:
            self.await_pull()
            self._check_data()
            if self.is_ahead or self._again or (not self._at_end and self._advance(alone=True)):
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
                self._open = False
                self._again = deque(kept)
                self.iterator = self._pull()
                return self._of.draws.untold_after(self.handed_out)
            self.lost = self.is_ahead or self._pulling
        return self._set_back()

    def _set_back(self) -> frozenset[str]:
        """Set the generators back to what they were after the last batch handed out."""
        self.release()
        places = self._places.up_to(self.handed_out)
        draws = self._of.draws
        if untold := draws.untold_after(self.handed_out):
            return untold
        after = places[-1].after if places else {}
        if not (draws.names and draws.after and (self.is_ahead or self._end_is_known)):
            return frozenset()
        if others := self.drawn_by_others() or frozenset(draws.names - after.keys()):
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
            self._batches = iter(())
            self._again.clear()
            self._ahead.clear()
            self._at_end = True

    def close(self) -> None:
        """Let an iterator that was given go, too; there is no other pass."""
        self.release()
        self._of = replace(self._of, loader=())
        self._places = PlacesPulled(())

    def begin(self, iteration: int) -> None:
        """The pass is asked for batches, of iterations from this number on; it may have been left.

        A pull that was under way then has ended, and its batch is kept, or dropped.
        """
        self._first = iteration - self.handed_out  # the iteration of its first batch
        if self.pulled:
            self.await_pull()

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
        self._open = True
        while True:
            if self._pulling:  # for the part before, which was left
                self.await_pull()
            if not self._again and (self._at_end or self._wants_turn() or not self._advance()):
                self._open = False
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
        of = self._of
        number = self.pulled + 1
        alone = alone or not of.ahead
        with self._lock:
            if self._at_end:  # released since the thread looked
                raise Cancelled
            self._ahead.begin_pull()
            before = of.draws.before_pull(number, self.handed_out, alone=alone)
            self._pulling = True
        begin_s = time.perf_counter()
        try:
            return self._called(number, before, alone)
        finally:
            if self.first is not None:
                seconds = time.perf_counter() - begin_s
                self.first.note(seconds, alone=alone, waited=alone and of.draws.in_turn)
            with self._lock:
                self._pulling = False
                self._pulled_last.notify_all()

    def _called(self, number: int, before: States, alone: bool) -> bool:
        """Call the loader, and note what it did."""
        of = self._of
        failure = None
        ended = False
        batch = None
        watched = of.draws.watches(number)
        data = None if of.draws.in_turn else of.data
        if data is not None:
            data.before_pull()
        try:
            if watched:
                with of.draws.watching(number):
                    batch = next(self._batches)
            else:
                batch = next(self._batches)
            self._places.check_coming(number, batch)
        except StopIteration:
            ended = True
        except (KeyboardInterrupt, Cancelled):
            of.generators.write(of.draws.drawn(before))  # the pull that is cut short was none
            raise
        except BaseException as error:  # noqa: BLE001 - raised when those before are handed out
            add_note(error, f"swpipe: raised by the pull of batch {self.pulled} of the pass")
            failure = error
            ended = True
        with self._lock:
            of.draws.after_pull(number, before, alone=alone)
        if self._prepared is not None:
            self._prepared.after_pull()
            self._prepared = None  # only the first pull is checked
        if data is not None:
            data.after_pull()
            if watched:
                of.draws.tensors.end_pull(batch)
        looks = not (ended or (alone and of.draws.in_turn))
        pulled = self._ahead.as_pulled(batch, number) if looks else None
        if not ended:  # it may take a while, and the caller must not wait for it
            parts = Parts.of(batch) if pulled is None else pulled.parts
            self._places.note(number, self.handed_out, parts, before, of.draws.after)
        with self._lock:
            if self._at_end:  # released meanwhile
                return False
            if ended:
                self.failure = failure
                self._batches = iter(())
                self._at_end = True
                self._end_is_known = failure is None
                return False
            self._ahead.add(pulled)
            self.pulled = number
            self._again.append(batch)
            return True


def _refuse_changed(changed: str) -> None:
    if changed:
        raise RuntimeError(
            f"the loop has changed {changed} while batches were pulled ahead: a plain loop "
            "would get others now. Change it between two passes, or do not pull the "
            "loader ahead"
        )
