"""One pass over a loader: what it pulls ahead, where it is, and how to get there again.

An error of the loader, and the end of its batches, come when the caller has got the batches before.
An iterator has no other pass: batches that were pulled and not handed out are given again.

A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's, is asked for its state
after each pull. ``place_in_pass`` leads it back.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swpipe._engine.waiting import Cancelled
from swpipe.accelerate_check import PreparedCheck
from swpipe.core.loaders import are_same, read_in_pass
from swpipe.errors import add_note
from swpipe.loops.batch_memory import BatchAsPulled, Watched
from swpipe.loops.live_loaders import (
    epochs_of,
    goes_on,
    has_live_workers,
    has_own_state,
    torchs,
)
from swpipe.loops.loader_draws import LoaderDraws
from swpipe.loops.pass_generators import PassGenerators, States, changed
from swpipe.loops.place_in_pass import PlaceInPass, PlacesPulled, check_length, led_back


@dataclass(frozen=True, slots=True)
class PulledLoader:
    """A loader, and how its passes are pulled.

    Attributes:
        loader: The loader.
        generators: The random generators that matter.
        draws: What it draws in mid-pass.
        ahead: Whether batches are pulled while earlier ones are in use.
        guarded: Whether it is looked whether they may be.
        makes_batches: Whether its code in this process makes the batches.
    """

    loader: Any
    generators: PassGenerators
    draws: LoaderDraws
    ahead: bool
    guarded: bool = False
    makes_batches: bool = False


class LoaderPass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches.
        pulled: How many batches were pulled of this pass.
        fed: How many of these the pipeline was given.
        handed_out: How many batches the caller got of this pass.
        ended: There are no more; the caller says so.
        failure: What the loader raised; the caller raises it at the end of the iterator.
        saved: Where it began, as given.
        lost: Whether batches that were pulled ahead were dropped.
        had_live_workers: Whether it has worker processes of an earlier pass.

    Args:
        of: The loader, and how it is pulled.
        saved: Where to go on in mid-pass, as ``state_dict`` returned it; None for a new pass.

    Raises:
        ValueError: The loader has fewer batches than were handed out, or cannot be begun again.
    """

    def __init__(self, of: PulledLoader, saved: Mapping[str, Any] | None = None) -> None:
        self._of, self.saved = of, saved
        self.had_live_workers = has_live_workers(of.loader)
        self._epochs = epochs_of(of.loader)
        self._places, self._has_state = PlacesPulled(of.loader), has_own_state(of.loader)
        self._is_elsewhere = self._end_is_known = False
        self._again: deque[Any] = deque()
        self._ahead: deque[BatchAsPulled] = deque()
        self._of_body: list[BatchAsPulled] = []
        self._modified: list[Watched] = []  # what was dropped and is not as it was pulled
        self.lost = False
        self._goes_on = goes_on(of.loader)
        self._holds = type(of.loader) in (list, tuple)  # its batches
        self._asked = self._at_end = self.ended = False
        self._latest: Any = None
        self.failure: BaseException | None = None
        self.handed_out = self.pulled = self.fed = 0
        of.draws.begin()
        if saved is not None:
            self.handed_out = self.pulled = self.fed = saved["batches"]
        self._at_start = of.generators.read() if saved is None else saved["at_start"]
        if saved is None:
            self._batches: Iterator[Any] = iter(of.loader)
            self._loader_at_start = self._places.begin({})
        else:
            self._loader_at_start = saved["loader_at_start"]
            self._batches = self._begun_again(saved)
        self._prepared = PreparedCheck(self._batches) if of.ahead else None
        self._when_begun = of.generators.read()
        self._is_own_iterator = self._batches is of.loader
        self._sampling: list[Any] = []
        self.iterator = self._pull()

    def _begun_again(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        of = self._of
        if self._goes_on and self.handed_out and not self._has_state:
            raise ValueError(
                f"the loader is an iterator ({type(of.loader).__name__}), which cannot be begun "
                "again: give a DataLoader or another object that makes a new iterator"
            )
        if not self._has_state:
            check_length(length_of(of.loader), self.handed_out)
        batches, places = led_back(of.loader, of.generators, saved)
        self._is_elsewhere = places is None
        after = {**saved["generators"], **(saved["after_pull"] or {})}
        of.generators.write(after)
        of.draws.begin()
        self._epochs = epochs_of(of.loader)
        places = places or [PlaceInPass(saved["loader"], None, {}, None)]
        places[-1] = replace(places[-1], after=after)
        self._places.begin(dict(enumerate(places, self.handed_out - len(places) + 1)))
        return batches

    def check_led_back(self) -> None:
        """Refuse the rest of another pass.

        Raises:
            ValueError: It is.
        """
        if self._is_elsewhere:
            loader = type(self._of.loader).__name__
            what = f"the state of the loader ({loader}) does not lead to" if self._has_state else ""
            raise ValueError(
                f"{what or f'the loader ({loader}), begun again, does not give'} the batches that "
                f"were handed out last, up to batch {self.handed_out} of the pass: what decides "
                "which come is in no state, such as a random generator that swpipe does not know, "
                "or is not as it was. Resume with the same data, seeds and epoch (set_epoch); let "
                "samplers and the dataset have their generators as attributes; or, if other "
                "batches do not matter, say load_state_dict(state, check=False)"
            )

    def state_dict(self, *, check: bool) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out."""
        of = self._of
        places = self._places.up_to(self.handed_out)
        after_pull: States | None = None if self.pulled else {}  # a pass has begun, and no more
        if places and (self.is_ahead or self._end_is_known):
            after_pull = of.draws.drawn(places[-1].after)
        loader = places[0].loader if places else self._loader_at_start
        again = [(one.before, one.checksum) for one in places if one.before is not None]
        return {
            "batches": self.handed_out,
            "at_start": self._at_start,
            "generators": of.generators.read(),
            "loader": self._places.ask() if loader is None else loader,
            "loader_at_start": self._loader_at_start,
            "again": [(before, checksum if check else None) for before, checksum in again],
            "after_pull": after_pull,
            "loader_draws": sorted(of.draws.names),
            "ahead": self.pulled - self.handed_out,
        }

    @property
    def is_of_another_epoch(self) -> bool:
        """Whether ``set_epoch`` was called since the pass began."""
        return epochs_of(self._of.loader) != self._epochs

    @property
    def is_ahead(self) -> bool:
        """Whether more was pulled than was handed out."""
        return self.pulled > self.handed_out

    def drawn_by_others(self) -> frozenset[str]:
        """Generators that others have drawn from since the last pull, which drew ahead of them."""
        return self._of.draws.drawn_by_others() if self.is_ahead else frozenset()

    def end(self) -> None:
        """The caller got the last batch, and asks for no more: the loader is asked, as a for would.

        Raises:
            ValueError: It has more.
        """
        if not self.ended:
            for _ in self.iterator:
                raise ValueError(f"the loader has more batches than its length, {self.handed_out}")
        self.ended = True
        if self.failure is not None:
            raise self.failure

    def make_ready(self, depth: int) -> None:
        """The caller asks for one iteration more, of so many that are then in flight.

        Raises:
            RuntimeError: The loop has changed what was used ahead, or drawn what the loader draws.
        """
        if self.is_ahead or self._at_end:
            self._check_unchanged()
        else:
            self._sampling = read_in_pass(torchs(self._of.loader))
        if self.is_ahead:
            self._of.draws.check_others()
        self.pull_alone(self.handed_out + depth)

    def pull_alone(self, most: int) -> None:
        """Pull so many batches in all now, if one of them is to be pulled while none else runs."""
        draws = self._of.draws
        if any(draws.wants_alone(number) for number in range(self.pulled + 1, most + 1)):
            while self.pulled < most and not self._at_end and self._advance(alone=True):
                self._again.append(self._latest)
                self._latest = None

    def _check_unchanged(self) -> None:
        """Refuse a list, or samplers, that would now give other batches than were pulled ahead."""
        loader = self._of.loader
        now = read_in_pass(torchs(loader))
        changed = "" if are_same(self._sampling, now) else "the loader's sampler or dataset"
        if type(loader) is list:
            now = loader[self.handed_out : self.pulled]
            same = are_same([pulled.batch for pulled in self._ahead], now)
            if not same or (self._at_end and len(loader) != self.pulled):
                changed = "the list"
        self._refuse_changed(changed)

    def _refuse_changed(self, changed: str) -> None:
        if changed:
            raise RuntimeError(
                f"the loop has changed {changed} while batches were pulled ahead: a plain loop "
                "would get others now. Change it between two passes, or leave the loader in turn "
                "(pull_ahead=False)"
            )

    def _pull(self) -> Iterator[Any]:
        while self._again or (not self._at_end and self._advance()):
            self.fed += 1
            yield self._taken()  # this frame must not keep it

    def _taken(self) -> Any:
        """The next batch that was pulled."""
        if self._again:
            return self._again.popleft()
        batch, self._latest = self._latest, None
        return batch

    def _advance(self, *, alone: bool = False) -> bool:
        """Pull the next batch; whether there is one."""
        of = self._of
        alone = alone or (not of.ahead and of.draws.wants_alone(self.pulled + 1))
        before = of.draws.before_pull(alone=alone, ahead=of.guarded and self.is_ahead)
        try:
            with of.draws.watching(alone=alone):
                self._latest = next(self._batches)
            self.pulled += 1
        except StopIteration:
            self._at_end = self._end_is_known = True
        except (KeyboardInterrupt, Cancelled):
            raise
        except BaseException as error:  # noqa: BLE001 - raised when those before are handed out
            add_note(error, f"swpipe: raised by the pull of batch {self.pulled} of the pass")
            self.failure, self._at_end = error, True
        # At the end samplers may draw once more.
        of.draws.after_pull(before, alone=alone or self._at_end, first=not self._asked)
        if self._prepared is not None and not self._asked:
            self._prepared.after_pull()
        self._asked = True
        self._refuse_changed(of.draws.changed_by_others)
        if self._at_end:
            self._batches = iter(())
            return False
        self._note_pulled(before, of.draws.after if before else {})
        return True

    def _note_pulled(self, before: States, after: States) -> None:
        of = self._of
        if of.guarded and (of.makes_batches or self._holds):
            pulled = BatchAsPulled(self._latest, keep=self._goes_on or self._holds)
            if of.makes_batches:
                self._check_memory(pulled)
            self._ahead.append(pulled)
        self._places.note(self.pulled, self.handed_out, self._latest, before, after)

    def _check_memory(self, pulled: BatchAsPulled) -> None:
        """Refuse a batch in the memory of an earlier one that tasks or the body may still use.

        Raises:
            RuntimeError: It is.
        """
        for earlier in (*self._of_body, *self._ahead):
            if earlier.is_used_again_by(pulled):
                raise RuntimeError(
                    "the loader has made a batch in the memory of an earlier one, which was "
                    "pulled ahead and is still in use: let it make a new tensor for each batch"
                )

    def hand_out(self) -> None:
        """The caller gets the next batch."""
        self.handed_out += 1
        self._of_body = [self._ahead.popleft()] if self._ahead else []

    def leave(self, *, failed: bool) -> frozenset[str]:
        """The caller leaves the pass before its end.

        Args:
            failed: In the middle of an iteration, whose batch is lost.

        Returns:
            Generators that the loader has drawn from ahead, and that cannot be set back.
        """
        if failed and self.is_ahead:
            self.hand_out()
        modified = [part for pulled in self._ahead for part in pulled.changed()]
        self._modified = [Watched(part) for part in modified]
        if self._goes_on:
            self._again = deque(pulled.batch for pulled in self._ahead)
            self.iterator = self._pull()
            return frozenset()
        self.lost = self.is_ahead
        self.release()
        places, draws = self._places.up_to(self.handed_out), self._of.draws
        after = places[-1].after if places else {}
        if not (self._of.guarded and draws.names and draws.after and self.is_ahead):
            return frozenset()
        if others := self.drawn_by_others() or (draws.names - after.keys()):
            return frozenset(others)
        self._of.generators.write(draws.drawn(after))
        draws.begin()
        return frozenset()

    def close(self) -> None:
        """Let an iterator that was given go, too; there is no other pass."""
        self.release()
        self._of, self._places = replace(self._of, loader=()), PlacesPulled(())

    def undo(self) -> None:
        """Forget a pass that has begun and was not asked for anything, and what it has drawn."""
        self.release()
        generators = self._of.generators
        if not (self.pulled or changed(self._when_begun, generators.read())):
            generators.write(self._at_start)

    def release(self) -> None:
        """Let the loader's iterator go, as a for does: a generator's ``finally`` runs."""
        self._batches = iter(())
        self._again.clear()
        self._ahead.clear()
        self._of_body.clear()
        self._latest = None
        self._at_end = True

    def goes_on(self) -> bool:
        """Whether a new pass is the rest of this one.

        Raises:
            RuntimeError: Tasks that ran ahead have modified its batches.
        """
        if self.lost and self._is_own_iterator:
            raise RuntimeError(
                f"the loader ({type(self._of.loader).__name__}) is its own iterator, and batches "
                "that were pulled ahead were dropped when the last pass was left: whether a new "
                "pass begins anew or goes on is not known. Let its __iter__ be a generator, or "
                "leave the loader in turn (pull_ahead=False)"
            )
        self.check_modified()
        return self._goes_on and not self.ended

    def check_modified(self) -> None:
        """Refuse to go on where the loader has batches that were dropped, and may give them again.

        What it makes anew has gone with the pass.

        Raises:
            RuntimeError: It has, and tasks that ran ahead have modified them.
        """
        if not any(one.is_there for one in self._modified):
            return
        gc.collect()  # what only refers to itself is nobody's
        if any(one.is_there for one in self._modified):
            raise RuntimeError(
                "tasks that ran ahead have modified batches that were dropped when the last pass "
                f"was left, and the loader ({type(self._of.loader).__name__}) would give them "
                "again: they would be modified twice. Let the tasks make new tensors, or the "
                "loader new batches in each pass"
            )


def length_of(loader: Any) -> float:
    """How many batches it says it has; infinity if it does not."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
