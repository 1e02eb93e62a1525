"""Who uses the random generators of a loop: its loader, its body, or both, serially.

The default generators of torch on the host, of numpy and of Python each have one state, and so has
each generator that the loader, its samplers and its dataset have as an attribute. A plain loop uses
a state in this order::

    pull 1    body 1    pull 2    body 2    pull 3    body 3

A loader that is ahead of the body changes this order. So either the loader alone uses the state, or
the body alone does, or the pulls are *serial* ("in turn" in messages): made on the caller's thread,
when it asks for their batch and all earlier bodies have ended. Who uses the state is known from the
loader's type, or declared (``draws=``), or observed:

    known, draws=True      AHEAD
    draws=False            WATCHED ──> AHEAD          a watched pull draws: an error
    not declared           WATCHED ──> AHEAD ──┐      a state changes, whoever changed it
                              └────────────────┴──> IN TURN, from then on

    WATCHED     pulls 2 to 5 of a loop, and pull 2 of its later passes, are serial, under
                ``GeneratorWatch``: a state that changes in a pull was drawn from by the loader,
                between two of them by the body. With draws=False these are pulls 2 and 3, and
                pulls 16, 64, 256 ... of each pass
    AHEAD       states are compared at the end of each pull, and at each hand-over during which no
                pull runs: then the loader's thread has been idle since its last pull

The first pull of a pass comes before any body, and may draw from any generator.

Guarantees
    - A body that draws from a generator that the loader has drawn from ahead is an error. The error
      names the first batch whose iteration may differ. If a state has changed while a pull and a
      body ran at the same time, either may have drawn: this is an error as soon as both were seen
      to draw from that generator.
    - A serial pull draws, and the body then finds, what they would in a plain loop.

Assumptions
    - ``draws=`` is true. ``draws=False`` is checked in watched pulls, ``draws=True`` at each pull
      and hand-over.
    - If a pull seeds a generator and sets it back, a body that draws only in between leaves no
      trace, and neither does a pull beside a body that does this. So a loader that is seen to do
      this is pulled serially.
    - If the first draw of one side and the only draw of the other come at the same time, they are
      taken for one draw.
    - The loader does not draw from the accelerator's generators that the body draws from, unless it
      is seen to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data import DataLoader

from swpipe.loops.generator_watch import GeneratorWatch
from swpipe.loops.pass_generators import PassGenerators, States, changed, names_in_words
from swpipe.loops.pulled_tensors import PulledTensors

_ALONE = 5
"""The number of watched pulls in a loop's first pass, the first one included: four bodies run
alone."""

_ALONE_LATER = 2
"""The number of watched pulls in a loop's later passes. They are not traced line by line, which
would cost each pass some time."""

_CHECKED = 3
"""The number of watched pulls if the user has declared that the loader draws nothing."""

_LATER = [4**power for power in range(2, 20)]
"""The numbers of the pulls that are watched in each pass, besides the first ones, where the user
has declared that the loader draws nothing. Each costs two loads that are not hidden: only a
declaration is worth it."""

_MEND = (
    "If the loader draws from none of torch's, numpy's and Python's default generators, say "
    "draws=False; else let a worker make its batches (DataLoader(num_workers=1)), or give it a "
    "generator of its own"
)

_OWN_MEND = "Give the loader, or the task or body, a generator that the other has not"

_ALONE_MEND = "draws=True says that the loader alone draws: leave it out, and the two take turns"

_warned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The loaders whose serial pulls a warning has reported, by id."""


class LoaderDraws:
    """The use of generators in one loop; its methods are called by one thread at a time.

    Attributes:
        names: Generators that the loader was seen to draw from in mid-pass, or was declared to.
        in_turn: Whether all pulls are serial from now on.
        after: The states of the loader's generators after the last pull.
        tensors: The tensors that watched pulls use.

    Args:
        generators: The generators of the loop.
        names: Generators that the loader draws from in any case.
        declared: ``draws=`` of the loop.
        known: Whether the loader's type tells that it draws from no other generator.
    """

    def __init__(
        self,
        generators: PassGenerators,
        names: Iterable[str] = (),
        *,
        declared: bool | None = None,
        known: bool = False,
    ) -> None:
        self.names = set(names)
        self.in_turn = False
        self.after: States = {}
        self.tensors = PulledTensors()
        self._generators = generators
        self._declared = declared
        self._known = known
        self._body = set[str]()  # generators that the tasks or the body were seen to draw from
        self._seen: States = {}  # the states when they were last compared
        # The generators that changed while a pull and a body ran, so that either may have drawn,
        # and the first batch whose body ran then.
        self._either: dict[str, int] = {}
        self._refused = ""  # an error for the caller's next request
        self._ahead = False  # some pull of this pass ran beside a body
        self._watch = GeneratorWatch(generators)
        # The number of first pulls of this pass that are serial; the second and later are watched.
        self._alone = 0

    def begin(self) -> None:
        """Begin a new pass: draws before it have the order of a plain loop."""
        self.after = {}
        self._seen = {}
        self._ahead = False
        if not (self._known or self._declared):
            first = _ALONE if self._declared is None else _CHECKED
            self._alone = _ALONE_LATER if self._alone else first

    # ------------------------------------------------------------------------ the caller asks

    def warning(self, loader: Any, call: str) -> str:
        """Return the text of a warning that pulls are serial because the body draws.

        It is empty if they are not, if ``draws=`` is declared, or if it was returned before.

        Args:
            loader: The loader.
            call: The call that makes the loop, with the declaration that the loader draws nothing.
        """
        if self._declared is not None or not (self.in_turn and self._body):
            return ""
        if _warned.get(id(loader)) is loader:
            return ""
        with suppress(TypeError):  # a class with slots: the next loop warns again
            _warned[id(loader)] = loader
        worker = "let a worker make its batches, by DataLoader(num_workers=1), or "
        return (
            f"the loop, a task or its body, draws from {names_in_words(self._body)}, and the "
            f"loader ({type(loader).__name__}) may, too: its batches are made in turn with the "
            "body, as in a plain loop, and nothing is gained. If it draws from none of torch's, "
            f"numpy's and Python's default generators, say\n    {call}\nelse "
            f"{worker if isinstance(loader, DataLoader) else ''}give it a generator of its own and "
            "say the same"
        )

    @property
    def who_draws(self) -> str:
        """The reason for serial pulls, in words, for the report after a pass."""
        if self._body:
            return "the loop draws random numbers, and the loader may (draws=False if it does not)"
        return (
            "the loader draws random numbers (draws=True if the loop, its tasks and body, do not)"
        )

    def wants_turn(self, number: int) -> bool:
        """Return whether a pull is serial, by its number in the pass from 1."""
        return self.in_turn or number <= self._alone or self.watches(number)

    def watches(self, number: int) -> bool:
        """Return whether a pull is watched, by its number in the pass from 1."""
        later = self._declared is False and not self._known and number in _LATER
        return later or 1 < number <= self._alone

    def asked(self, handed_out: int, *, pulling: bool, ahead: bool) -> None:
        """Compare the states when the caller asks for an iteration, or for a state of the loop.

        Args:
            handed_out: The number of batches that the caller has received.
            pulling: Whether a pull is under way.
            ahead: Whether the loader is past these batches.

        Raises:
            RuntimeError: The loader and the body have drawn from the same generator.
        """
        # During a pull, the comparison at its end sees the same changes, as undecided ones.
        if not pulling:
            self._note_body(self._changes(), handed_out, ahead=ahead)
        if self._either:
            self._refuse_either(self._body & self.names)
        # Raised here, on the caller's thread, also where the pulling thread has found the conflict.
        if self._refused:
            refused = self._refused
            self._refused = ""
            raise RuntimeError(refused)

    # --------------------------------------------------------------------------------- a pull

    def before_pull(self, number: int, handed_out: int, *, alone: bool) -> States:
        """Return the states before a pull: of all generators for a first pull, else the loader's.

        Args:
            number: The number of the pull in the pass, from 1.
            handed_out: The number of batches that the caller has received.
            alone: Whether nothing runs beside the pull.
        """
        if alone and number > 1:
            self._note_body(self._changes(), handed_out, ahead=False)
        self._ahead |= not alone
        reads_all = alone and number <= _ALONE and not self._known
        return self._generators.read(None if reads_all else self.names | self._generators.own)

    @contextmanager
    def watching(self, number: int) -> Iterator[None]:
        """Watch the generators and tensors within the block, in which a watched pull is made."""
        self._watch.use = None
        # Where the two take turns, no body runs in between that could see what a pull sets back.
        traced = number > _ALONE_LATER or self._alone > _ALONE_LATER
        if not traced or (self.in_turn and self._declared is None):
            yield
            return
        self.tensors.begin_pull()
        with self.tensors, self._watch:
            yield

    def after_pull(
        self, number: int, before: States, handed_out: int, *, alone: bool, batch: object = None
    ) -> None:
        """Note which generators a pull has drawn from, given the states before the pull.

        Args:
            number: The number of the pull in the pass, from 1.
            before: The states before the pull.
            handed_out: The number of batches that the caller had received when the pull began.
            alone: Whether nothing ran beside the pull.
            batch: Its batch.

        Raises:
            RuntimeError: The loader has drawn, and ``draws=False``.
        """
        drawn = self._changes()
        # After serial pulls nothing is set back and nothing new is learned, so reading the states,
        # which takes some time, is left out.
        unread = alone and self.in_turn and number > _ALONE
        self.after = {} if unread else self._generators.read(before)
        # The first pull of a pass comes before any body, so its draws decide nothing.
        if number == 1:
            return
        if not alone:
            if self._declared is None:
                for name in drawn - self._generators.own:
                    self._either.setdefault(name, handed_out)
                    self.in_turn = True
            return
        drawn |= changed(before, self.after)
        where = ""
        if self.watches(number):
            self.tensors.end_pull(batch)
            if self._watch.use is not None:
                drawn |= self._watch.use.names
                where = f", in {self._watch.use.where}"
        others = drawn - self._generators.own
        if others and self._declared is False:
            raise RuntimeError(
                "draws=False says that the loader draws from no default generator, and pull "
                f"{number} of the pass has drawn from {names_in_words(others)}{where}, or seeded "
                "it and set it back. Leave draws= out, or give the loader a generator of its own"
            )
        self.names |= drawn
        if others and self._declared is None:
            self.in_turn = True

    def state_dict(self) -> dict[str, Any]:
        """Return what a saved state has of this."""
        return {"loader_draws": sorted(self.names), "in_turn": self.in_turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was seen before the state was saved."""
        self.names.update(state["loader_draws"])
        self.in_turn |= state["in_turn"]

    def drawn(self, states: States) -> States:
        """Return the given states of the generators that the loader draws from."""
        return {name: states[name] for name in self.names & states.keys()}

    @property
    def compares(self) -> bool:
        """Whether only the end of a pull, by comparing the default generators, shows its draws.

        This holds for a loader that is ahead and has no declaration.
        """
        return self._declared is None and not (self._known or self.in_turn)

    @property
    def undecided(self) -> Set[str]:
        """The generators that a pull ahead, or a body beside it, may have drawn from."""
        return self._either.keys()

    def drawn_by_others(self) -> frozenset[str]:
        """Return the loader's generators that other code has drawn from since the last pull.

        Call this method only while no pull is under way.
        """
        return changed(self.drawn(self.after), self._generators.read(self.names))

    # ------------------------------------------------------------------------- what was seen

    def _changes(self) -> frozenset[str]:
        """Return the generators whose states have changed since the last comparison."""
        # If pulls are serial because the body draws, its further draws need not be found.
        settled = self.in_turn and self._body and not self._either
        only_own = self._known or self._declared is False or settled
        compared = self._generators.own if only_own else self._generators.on_host
        if not compared:
            return compared
        before = self._seen
        self._seen = self._generators.read(compared)
        return changed(before, self._seen)

    def _note_body(self, names: frozenset[str], handed_out: int, *, ahead: bool) -> None:
        if not names:
            return
        self._body |= names
        own = names & self._generators.own
        # Without a declaration, any draw of the body makes pulls serial: the loader may draw, too.
        if self._declared is None or (own and not self._ahead):
            self.in_turn = True
        # Draws that come too late: the loader has used these generators ahead of the body.
        late = own if self._declared is not True else names
        if self._ahead and late:
            self._refuse(late, handed_out, _OWN_MEND if own else _ALONE_MEND)
        # In a plain loop, a later pull that may have drawn would come after this body.
        if ahead:
            self._refuse_either(names)

    def _refuse_either(self, names: Set[str]) -> None:
        """Refuse generators that either side may have drawn from, once both sides have."""
        either = self._either.keys() & names
        if either:
            self._refuse(either, min(self._either[name] for name in either), _MEND)

    def _refuse(self, names: Iterable[str], handed_out: int, mend: str) -> None:
        self._refused = (
            f"the loader and the loop, a task or its body, both draw from {names_in_words(names)}, "
            "and the loader has drawn ahead of the loop: the iteration of batch "
            f"{max(1, handed_out)} of the pass is the first that may differ from a plain loop's. "
            f"{mend}"
        )
        self._either.clear()
