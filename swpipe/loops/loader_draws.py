"""What a loader that is pulled ahead draws in the middle of a pass, and whether others do, too.

    plain loop     pull 1   loop 1   pull 2   loop 2   pull 3
    ahead          pull 1   pull 2   pull 3   loop 1   loop 2      they must not both draw

This is for generators that cannot be replaced: Python's, numpy's, those that the loader was given,
and torch's where a loader seeds them. What a pull draws by torch's operators, ``DrawViews`` sees.

Some pulls are made in turn: the 2nd of each pass, and once for each loader the 16th, 128th and so
on. A state that such a pull changes is one that the loader draws from. Then

- from a default generator it draws in turn, from then on: who drew while a batch was pulled, nobody
  could tell;
- from a generator of its own it draws ahead, unless others have drawn from it before the 2nd pull.
  What others draw later is an error, seen whenever no pull is under way.

What was found is kept with the loader.

Assumptions
    - A loader that draws from a default generator rarely has drawn in a pull that was measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swpipe.loops.pass_generators import (
    PassGenerators,
    States,
    changed,
    is_default,
    told_names,
)

_EACH_PASS = 2
"""The pull that is measured in each pass: between two the loop may switch augmentation on."""

QUIET = 4
"""So many draws by torch's operators are in turn before others are ahead."""


@dataclass(slots=True)
class KnownDraws:
    """What is known of a loader.

    Attributes:
        names: The generators that it draws from in mid-pass.
        looked: Pulls of a pass that were measured, by their numbers.
        shared: Whether others draw from them, too, or may.
        quiet: How often it drew by torch's operators, in turn, and nobody else since the time
            before.
        torch_shared: Whether others draw from torch's default generator, too.
        waits: How many pulls waited at a draw by torch's operators.
    """

    names: frozenset[str] = frozenset()
    looked: set[int] = field(default_factory=set)
    shared: bool = False
    quiet: int = 0
    torch_shared: bool = False
    waits: int = 0

    @property
    def torch_ahead(self) -> bool:
        """Whether it draws by torch's operators ahead."""
        return self.quiet >= QUIET and not self.torch_shared

    def told(self) -> tuple[set[str], set[str]]:
        """The default generators that it draws from ahead, and those that it draws from in turn."""
        in_turn = {*filter(is_default, self.names)}
        if self.torch_shared and self.waits >= QUIET:
            in_turn |= {"torch cpu"}
        return {"torch cpu"} if self.torch_ahead else set(), in_turn


_known: dict[int, tuple[weakref.ref[Any], KnownDraws]] = {}
"""By the loader's id."""


def known_draws(loader: Any) -> KnownDraws:
    """What is known of this loader, to be added to."""
    number = id(loader)
    if number in _known and _known[number][0]() is loader:
        return _known[number][1]
    known = KnownDraws()
    try:
        _known[number] = (weakref.ref(loader, lambda _: _known.pop(number, None)), known)
    except TypeError:  # a list, say, or a class with slots: others begin anew
        return known
    return known


class LoaderDraws:
    """Of one loader, in all passes.

    Attributes:
        known: What is known of it.
        after: The states after the last pull.

    Args:
        generators: The generators that matter.
        names: Those that the loader draws from in any case.
        measured: Whether it may draw from others, which has to be found out.
        known: What is known of it.
    """

    def __init__(
        self,
        generators: PassGenerators,
        names: Iterable[str] = (),
        *,
        measured: bool,
        known: KnownDraws | None = None,
    ) -> None:
        self.known = KnownDraws() if known is None else known
        self.known.names |= frozenset(names)
        self.after: States = {}
        self._generators = generators
        self._measures = measured

    @property
    def names(self) -> frozenset[str]:
        """The generators that the loader is known to draw from in mid-pass."""
        return self.known.names

    def begin(self) -> None:
        """A new pass begins: what was drawn before it was drawn in a plain loop, too."""
        self.after = {}

    def wants_turn(self, number: int) -> bool:
        """Whether a pull, by its number in the pass from 1, should be made in turn."""
        if number == _EACH_PASS:
            return self._measures or bool(self.names)
        bits = number.bit_length()
        power = number == 1 << (bits - 1) and bits % 3 == 2
        return self.known.shared or (self._measures and power and number not in self.known.looked)

    def before_pull(self, *, alone: bool, ahead: bool) -> States:
        """What the states are before a pull.

        Args:
            alone: It is made in turn, and measured.
            ahead: Earlier batches have not been handed out.
        """
        measures = alone and self._measures
        before = self._generators.read(None if measures else self.names | self._generators.own)
        if shared := changed(self.drawn(self.after), before):
            if ahead:
                self._refuse(shared)
            self.known.shared = True
        return before

    def after_pull(self, number: int, before: States, *, alone: bool, seen: bool) -> None:
        """Note what a pull has drawn.

        Args:
            number: Of the pull, in the pass from 1.
            before: What the states were.
            alone: It was made in turn; not the first, in which samplers draw their seed.
            seen: Torch's draws in it were seen as they came.
        """
        if not before:
            return
        self.after = self._generators.read(before)
        if alone:
            self.known.looked.add(number)
            found = changed(before, self.after)
            self.known.names |= found - ({"torch cpu"} if seen else set())
            self.known.shared |= any(map(is_default, self.names))

    def drawn(self, states: States) -> States:
        """Of these states, those of the generators that the loader draws from."""
        return {name: states[name] for name in self.names & states.keys()}

    def check_others(self) -> None:
        """Refuse what others have drawn since the last pull; while no pull is under way."""
        if shared := self.drawn_by_others():
            self._refuse(shared)

    def drawn_by_others(self) -> frozenset[str]:
        """From which of them others have drawn since the last pull; while none is under way."""
        return changed(self.drawn(self.after), self._generators.read(self.names))

    def _refuse(self, shared: Iterable[str]) -> None:
        self.begin()  # it is told once
        raise both_draw(shared)


def both_draw(names: Iterable[str]) -> RuntimeError:
    """The error where others have drawn from what the loader has drawn from ahead."""
    return RuntimeError(
        f"the loader and the loop, a task or its body, both draw from {told_names(names)}, and the "
        "loader has drawn ahead of the loop: they do not draw in the order of a plain loop. Let "
        "the loader's workers draw (DataLoader(num_workers=1)), give the loader, the task or the "
        "body a generator of its own, or do not pull the loader ahead"
    )
