"""What a loader that is pulled ahead draws in the middle of a pass, and whether others do, too.

    plain loop     pull 1   loop 1   pull 2   loop 2   pull 3
    ahead          pull 1   pull 2   pull 3   loop 1   loop 2      they must not both draw

Some pulls are made alone, on the caller's thread, while nothing else of the loop runs: those of
the first call, and later the 16th, 128th, 1024th and so on of a pass. A state that such a pull
changes is one that the loader draws from. Then, and until 16 pulls were so measured, all are made
alone, so that what others draw shows between them. Later pulls run beside tasks, and what others
draw is seen whenever no pull is under way. What the loader begins to draw from torch's generators
beside tasks, ``PullWatch`` sees.

The first pull of a pass comes before all else, as in a plain loop: samplers draw their seed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from swpipe.core.messages import listed
from swpipe.loops.pass_generators import PassGenerators, States, changed, changed_devices, told
from swpipe.loops.pull_watch import PullWatch

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
        watch: Watches pulls that run beside tasks.
    """

    def __init__(
        self,
        generators: PassGenerators,
        names: Iterable[str] = (),
        *,
        measured: bool,
        watch: PullWatch | None = None,
    ) -> None:
        self.names = frozenset(names)
        self.after: States = {}
        self._generators = generators
        self._measures = measured
        self._watch = watch
        self._devices: set[str] = set()  # of torch's default generators; all, where none is known
        self._alone = 0  # so many pulls

    def begin(self) -> None:
        """A new pass begins: what was drawn before it was drawn in a plain loop, too."""
        self.after = {}
        if self._watch is not None:
            self._watch.begin()

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
        else:
            before = self._generators.read({*self.names, *self._generators.own})
        if ahead:
            self._compare(before)
        return before

    def watching(self, *, alone: bool) -> AbstractContextManager[None]:
        """A pull is made within the block."""
        return nullcontext() if self._watch is None else self._watch.watching(alone=alone)

    def after_pull(self, before: States, *, alone: bool, first: bool) -> None:
        """Note what a pull has drawn."""
        if before:
            self.after = self._generators.read(before)
            if alone:
                self._alone += 1
                if not first:
                    self.names |= changed(before, self.after)
                    self._devices |= changed_devices(before, self.after)
        seen = self._watch.drawn if self._watch is not None and not first else ()
        if seen and "torch" not in self.names:
            self.names |= {"torch"}
            self._devices |= {*seen}
            self.after = self._generators.read(self.names)

    @property
    def changed_by_others(self) -> str:
        """What others have changed of what the loader reads, between two pulls."""
        return "" if self._watch is None else self._watch.changed

    def drawn(self, states: States) -> States:
        """Of these states, those of the generators that the loader draws from."""
        found = {name: states[name] for name in self.names & states.keys()}
        if "torch" in found and self._devices:
            found["torch"] = {d: one for d, one in found["torch"].items() if d in self._devices}
        return found

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
        return changed(self.drawn(self.after), now)

    def _compare(self, now: States) -> None:
        if shared := changed(self.drawn(self.after), now):
            self.begin()  # it is told once
            raise RuntimeError(
                f"the loader and the loop, a task or its body, both draw from "
                f"{listed([told(name) for name in sorted(shared)])}, and the loader is pulled "
                "ahead: they do not draw in the order of a plain loop. Let the loader's workers "
                "draw (DataLoader(num_workers=1)), give the task random numbers of its own "
                "(PipelineTask(..., random=True)) or the loader or the body a generator of its "
                "own, or leave the loader in turn (pull_ahead=False)"
            )
