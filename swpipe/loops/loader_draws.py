"""What a loader that is pulled ahead draws in the middle of a pass, and whether others do, too.

    plain loop     pull 1   loop 1   pull 2   loop 2   pull 3
    ahead          pull 1   pull 2   pull 3   loop 1   loop 2      they must not both draw

Some pulls are made alone, on the caller's thread, while nothing else of the loop runs: those of
the first call, and later the 16th, 128th, 1024th and so on of a pass. A state that such a pull
changes is one that the loader draws from. Then, and until 16 pulls were so measured, all are made
alone, so that what others draw shows between them. Later pulls run beside tasks, and what others
draw is seen whenever no pull is under way.

The first pull of a pass comes before all else, as in a plain loop: samplers draw their seed there.
"""

from __future__ import annotations

from collections.abc import Iterable

from swpipe.core.messages import listed
from swpipe.loops.pass_generators import PassGenerators, States, changed, told

_ALONE = 16


class LoaderDraws:
    """Of one loader, in all passes.

    Attributes:
        names: The generators that the loader is known to draw from in mid-pass.
        after: Their states after the last pull.

    Args:
        generators: The generators that matter.
        names: Those that the loader draws from in any case.
        measured: Whether it may draw from others, which has to be found out.
    """

    def __init__(
        self, generators: PassGenerators, names: Iterable[str] = (), *, measured: bool
    ) -> None:
        self.names = frozenset(names)
        self.after: States = {}
        self._generators = generators
        self._measures = measured
        self._alone = 0  # so many pulls

    def begin(self) -> None:
        """A new pass begins: what was drawn before it was drawn in a plain loop, too."""
        self.after = {}

    def wants_alone(self, number: int) -> bool:
        """Whether a pull, by its number in the pass from 1, should be made alone."""
        if self.names and self._alone < _ALONE:
            return True
        bits = number.bit_length()
        return self._measures and number == 1 << (bits - 1) and bits % 3 == 2

    def before_pull(self, *, alone: bool, ahead: bool) -> States:
        """What the states are before a pull.

        Raises:
            RuntimeError: Others have drawn from a generator that the loader draws from.
        """
        if alone and self._measures:
            before = self._generators.read()
        elif self.names:
            before = self._generators.read(self.names)
        else:
            return {}
        if ahead:
            self._compare(before)
        return before

    def after_pull(self, before: States, *, alone: bool, first: bool) -> None:
        """Note what a pull has drawn."""
        if before:
            self.after = self._generators.read(before)
            if alone:
                self._alone += 1
                if not first:
                    self.names |= changed(before, self.after)

    def check_others(self) -> None:
        """Refuse what others have drawn since the last pull; for use between calls.

        Raises:
            RuntimeError: They have, from a generator that the loader draws from.
        """
        if self.names:
            self._compare(self._generators.read(self.names))

    def drawn_by_others(self) -> frozenset[str]:
        """The same, told."""
        if not self.names:
            return frozenset()
        now = self._generators.read(self.names)
        return changed({name: self.after[name] for name in self.names & self.after.keys()}, now)

    def _compare(self, now: States) -> None:
        known = {name: self.after[name] for name in self.names & self.after.keys()}
        if shared := changed(known, now):
            self.begin()  # it is told once
            raise RuntimeError(
                f"the loader and the loop, a task or its body, both draw from "
                f"{listed([told(name) for name in sorted(shared)])}, and the loader is pulled "
                "ahead: they do not draw in the order of a plain loop. Let the loader's workers "
                "draw (DataLoader(num_workers=1)), give the task random numbers of its own "
                "(PipelineTask(..., random=True)) or the loader or the body a generator of its "
                "own, or leave the loader in turn (pull_ahead=False)"
            )
