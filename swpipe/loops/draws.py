"""Who uses the random generators of a loop: its loader, its body, or the two in turn.

The default generators of torch on the host, of numpy and of Python are one state, and so are the
generators that the loader, its samplers and its dataset have as attributes. A plain loop uses a
state in this order::

    pull 1    body 1    pull 2    body 2    pull 3    body 3

and a loader that is ahead of the body does not. So either the loader uses the state, or the body
does, or the pulls are made *in turn*: on the caller's thread, when it asks for their batch and all
earlier bodies have ended. Who uses it is known by the loader's type, or said (``draws=``), or seen:

    known, draws=True      AHEAD
    draws=False            WATCHED ──> AHEAD          a watched pull draws: an error
    nothing said           WATCHED ──> AHEAD ──┐      a state changes, whoever changed it
                              └────────────────┴──> IN TURN, from then on

    WATCHED     pulls 2 to 5 of a loop (2 and 3, with draws=False), pull 2 of its later passes, and
                pulls 16, 64, 256 ... are made in turn, under ``GeneratorWatch``: what changes in
                them the loader has drawn, and what changes between two of them the body has
    AHEAD       states are compared at the end of each pull, at its beginning unless the pull before
                has just ended, and at each hand-over beside which there is no pull

The first pull of a pass comes before any body, and may draw whatever it likes.

Guarantees
    - A body that draws from what the loader has drawn from ahead is an error, which names the first
      batch whose iteration may differ. If a state has changed while a pull and a body ran at the
      same time, either may have drawn: it is an error as soon as both were seen to draw from it.
    - What a pull draws in turn, and what the body finds then, is that of the plain loop.

Assumptions
    - ``draws=`` is true. ``draws=False`` is checked in watched pulls, ``draws=True`` at each pull
      and hand-over.
    - A body that draws only in the moment in which a pull has seeded a generator, and sets it back,
      leaves no trace, nor does a pull beside such a body. So a loader that is seen to do this takes
      turns.
    - The first draw of one side, at the same time as the only one of the other, is taken for one.
    - What the body draws on an accelerator the loader does not, unless it is seen to.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from swpipe.loops.generator_watch import GeneratorWatch, Use
from swpipe.loops.pass_generators import (
    PassGenerators,
    States,
    changed,
    names_told,
)
from swpipe.loops.pulled_tensors import PulledTensors

_ALONE = 5
"""Up to so many pulls of a loop's first pass are watched: four bodies run alone."""

_TOUCH_S = 2e-4
"""A pull that begins within so many seconds of the end of the one before has no look of its own."""

_CHECKED = 3
"""The same where the user has said that the loader draws nothing."""

_LATER = [4**power for power in range(2, 20)]
"""These pulls of each pass are watched, too."""

_BOTH_DRAW = (
    "the loader and the loop, a task or its body, both draw from {names}, and the loader has drawn "
    "ahead of the loop: the iteration of batch {batch} of the pass is the first that may differ "
    "from a plain loop's. {mend}"
)

_MEND = (
    "If the loader draws from none of torch's, numpy's and Python's default generators, say "
    "draws=False; else let a worker make its batches (DataLoader(num_workers=1)), or give it a "
    "generator of its own"
)

_OWN_MEND = "Give the loader, or the task or body, a generator that the other has not"

_ALONE_MEND = "draws=True says that the loader alone draws: leave it out, and the two take turns"

_IN_TURN = (
    "the loop, a task or its body, draws from {names}, and the loader ({kind}) may, too: its "
    "batches are made in turn with the body, as in a plain loop, and nothing is gained. If it "
    "draws from none of torch's, numpy's and Python's default generators, say\n    {call}\n{else_}"
)

_WORKER = "else let a worker make its batches, by DataLoader(num_workers=1), or give it"

_told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The loaders of which a warning has said that they take turns, by id."""


def told_once(loader: Any) -> bool:
    """Return whether this is the first call for a loader."""
    if _told.get(id(loader)) is loader:
        return False
    with suppress(TypeError):  # a class with slots: the next loop warns again
        _told[id(loader)] = loader
    return True


class _Untold(NamedTuple):
    """A generator changed while a pull and a body ran.

    Attributes:
        batch: The first batch whose body ran then.
        pull: The last pull that ran then.
    """

    batch: int
    pull: int


class LoaderDraws:
    """The use of generators in one loop; one thread at a time is here.

    Attributes:
        names: Generators that the loader was seen to draw from in mid-pass, or was given.
        in_turn: Whether all pulls are made in turn from now on.
        body: Generators that the loop's tasks or body were seen to draw from.
        tensors: Those that watched pulls use.

    Args:
        generators: The generators of the loop.
        names: Those that the loader draws from in any case.
        said: ``draws=`` of the loop.
        known: Whether the loader's type tells that it draws from nothing else.
    """

    def __init__(
        self,
        generators: PassGenerators,
        names: Iterable[str] = (),
        *,
        said: bool | None = None,
        known: bool = False,
    ) -> None:
        self.names = set(names)
        self.body: set[str] = set()
        self.in_turn = False
        self.after: States = {}
        self._generators = generators
        self._said = said
        self._known = known
        self._all = generators.own | generators.defaults
        self._passes = 0
        self._seen: dict[str, Any] = {}
        self._untold: dict[str, _Untold] = {}
        self._refused = ""
        self._ahead = False  # a pull of this pass was
        self._handed_out = 0  # when the last pull began
        self._looked_s = 0.0  # when it ended
        self._watch = GeneratorWatch(generators)
        self._watched: set[int] = set()
        self._marks: tuple[bytes | None, ...] | None = None
        self.tensors = PulledTensors()

    def begin(self) -> None:
        """A new pass begins: what was drawn before it was drawn in a plain loop, too."""
        self.after = {}
        self._seen = {}
        self._marks = None
        self._untold = {name: _Untold(one.batch, 0) for name, one in self._untold.items()}
        self._passes += 1
        self._ahead = False
        if not self._known and self._said is not True:
            first = 2 if self._passes > 1 else _ALONE if self._said is None else _CHECKED
            self._watched = {*range(1, first + 1), *_LATER}

    # ------------------------------------------------------------------------ the caller asks

    @property
    def takes_turns_with_body(self) -> bool:
        """Whether pulls are made in turn because the body draws, and nothing is said."""
        return self.in_turn and bool(self.body) and self._said is None

    @property
    def who_draws(self) -> str:
        """Why pulls are made in turn, after a pass."""
        if self.body:
            return "the loop draws random numbers, and the loader may (draws=False if it does not)"
        return (
            "the loader draws random numbers (draws=True if the loop, its tasks and body, do not)"
        )

    def why_in_turn(self, loader: Any, call: str) -> str:
        """What is told of that.

        Args:
            loader: The loader.
            call: How the loop is made where the loader draws nothing.
        """
        torchs = isinstance(loader, DataLoader)
        else_ = f"{_WORKER if torchs else 'else give it'} a generator of its own and say the same"
        kind = type(loader).__name__
        names = names_told(self.body)
        return _IN_TURN.format(names=names, kind=kind, call=call, else_=else_)

    def wants_turn(self, number: int) -> bool:
        """Whether a pull, by its number in the pass from 1, is made in turn."""
        return self.in_turn or number in self._watched

    def watches(self, number: int) -> bool:
        """Whether a pull is watched."""
        return number in self._watched and number > 1

    def asked(self, handed_out: int, *, pulling: bool) -> None:
        """The caller asks for an iteration: the body of the batch before has ended.

        Raises:
            RuntimeError: The loader and the body have drawn from the same generator.
        """
        # The look at the end of a pull that is under way sees what this one would.
        if not pulling and (found := self._changes()):
            self._note_body(found, handed_out)
        if self._refused:
            refused = self._refused
            self._refused = ""
            raise RuntimeError(refused)

    # --------------------------------------------------------------------------------- a pull

    def before_pull(self, number: int, handed_out: int, *, alone: bool) -> States:
        """What the states are before a pull; of those that the loader draws from, if not watched.

        Args:
            number: Of the pull, in the pass from 1.
            handed_out: How many batches the caller has got.
            alone: Whether nothing runs beside it.
        """
        # What is drawn between two pulls that nearly touch counts as drawn in the second one.
        if alone or time.perf_counter() - self._looked_s > _TOUCH_S:
            found = self._changes()
            if found and number > 1:
                self._note_body(found, handed_out)
        self._handed_out = handed_out
        self._ahead |= not alone
        if alone and self._is_deep(number):
            return self._generators.read()
        names = self.names | self._generators.own
        return self._generators.read(names) if names else {}

    def _is_deep(self, number: int) -> bool:
        """Return whether all states are read around a pull that is made alone."""
        return not self._known and (number <= _ALONE or self.watches(number))

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """Watch the pull that is made within the block, if it is one of those."""
        if not self._looks_closely(number):
            yield
            return
        with self.tensors, self._watch:
            yield

    def _looks_closely(self, number: int) -> bool:
        """Return whether a watched pull is traced line by line.

        The first ones of later passes are not; nor is one in turn of which nothing is said: what a
        pull does to a generator for a moment, in turn, nobody sees.
        """
        if self.in_turn and self._said is None:
            return False
        return self.watches(number) and (self._passes == 1 or number > _ALONE)

    def after_pull(self, number: int, before: States, *, alone: bool) -> None:
        """Note what a pull has drawn, given the states before it.

        Raises:
            RuntimeError: The loader has drawn, and ``draws=False``.
        """
        found = self._changes()
        self._looked_s = time.perf_counter()
        # In turn nothing is set back, nor is anything new seen, and states take some time.
        unread = alone and self.in_turn and not self._is_deep(number)
        self.after = {} if unread or not before else self._generators.read(before)
        if number == 1:
            return
        use = self._watch.use if self._looks_closely(number) else None
        if alone:
            drawn = found | changed(before, self.after) | (use.names if use else frozenset())
            self._note_loader(drawn, number, use)
        elif found and self._said is None and not self._known:
            self._note_untold(found - self._generators.own, number)

    def drawn(self, states: States) -> States:
        """Of these states, those of the generators that the loader draws from."""
        return {name: states[name] for name in self.names & states.keys()}

    @property
    def compares(self) -> bool:
        """Whether a change of a default generator is seen when the pull has ended, and not before.

        Nothing is said of the loader, which is ahead.
        """
        return self._said is None and not (self._known or self.in_turn)

    def untold_after(self, handed_out: int) -> frozenset[str]:
        """Generators that pulls after this one may have drawn from, or the body."""
        return frozenset(name for name, one in self._untold.items() if one.pull > handed_out)

    def drawn_by_others(self) -> frozenset[str]:
        """From which of them others have drawn since the last pull; while none is under way."""
        return changed(self.drawn(self.after), self._generators.read(self.names))

    # ------------------------------------------------------------------------- what was seen

    def _changes(self) -> frozenset[str]:
        """The generators whose states have changed since the last look."""
        compared = self._compared()
        if not compared:
            return frozenset()
        marks = self._generators.marks()
        if marks is not None and marks == self._marks:
            return frozenset()
        self._marks = marks
        before = self._seen
        self._seen = self._generators.read(compared)
        return changed(before, self._seen)

    def _compared(self) -> frozenset[str]:
        """The generators that are compared at pulls and hand-overs."""
        own = self._generators.own
        settled = self.in_turn and self.body and not self._untold
        return own if self._known or self._said is False or settled else self._all

    def _note_body(self, names: frozenset[str], handed_out: int) -> None:
        self.body |= names
        own = names & self._generators.own
        if self._said is None or (own and not self._ahead):
            self.in_turn = True
        late = own if self._said is not True else names
        if self._ahead and late:
            self._refuse(late, handed_out, _OWN_MEND if own else _ALONE_MEND)
        untold = names & self._untold.keys()
        # A pull that may have drawn comes after this body in a plain loop.
        self._refuse_untold([name for name in untold if self._untold[name].pull > handed_out])
        self._check_untold()

    def _note_loader(self, names: frozenset[str], number: int, use: Use | None) -> None:
        others = names - self._generators.own
        if self._said is False and others and not self._known:
            where = f", in {use.where}" if use and use.where else ""
            raise RuntimeError(
                f"draws=False says that the loader draws from no default generator, and pull "
                f"{number} of the pass has drawn from {names_told(others)}{where}, or seeded it "
                "and set it back. Leave draws= out, or give the loader a generator of its own"
            )
        self.names |= names
        if self._said is None and others and not self._known:
            self.in_turn = True
        self._check_untold()

    def _note_untold(self, names: frozenset[str], number: int) -> None:
        for name in names:
            first = self._untold.get(name, _Untold(self._handed_out, 0)).batch
            self._untold[name] = _Untold(first, number)
            self.in_turn = True
        self._check_untold()

    def _check_untold(self) -> None:
        self._refuse_untold(self._untold.keys() & self.body & self.names)

    def _refuse_untold(self, names: Collection[str]) -> None:
        if names:
            self._refuse(names, min(self._untold[name].batch for name in names), _MEND)

    def _refuse(self, names: Iterable[str], handed_out: int, mend: str) -> None:
        self._untold.clear()
        told = names_told(names)
        self._refused = _BOTH_DRAW.format(names=told, batch=max(1, handed_out), mend=mend)
