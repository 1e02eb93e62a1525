"""Values that code ahead of the loop's body changes: the body sees those that go with its batch.

    ahead     batch 2   batch 3   batch 4
    caller                        body 1              body 2
                                  show 1    hide      show 2

The values are read before and after each batch, and what the code has changed is noted with what it
was. Before the body, the changes for later batches are undone; afterwards they are made again. What
runs ahead does so only while the caller is in a call of the pipeline, and so never beside the body.

Guarantees
    - The body sees the values of the plain loop, and so does what comes after a pass that was left.
    - ``changed_since`` finds what the body has changed and the code ahead may have used already.

Assumptions
    - Nobody else changes the values: no task, and no thread.
"""

from __future__ import annotations

from typing import Any

from swpipe.inference.reach import PlaceId
from swpipe.tuning.reached_values import ReachedValue


class ValuesByBatch:
    """Some values, and how each batch has changed them.

    Attributes:
        values: The values, by where they are. More may be added; ``stop`` forgets them.
        changed: Places of those that the code ahead has changed.
        in_use: Places of generators that the code ahead uses at any time.
    """

    def __init__(self) -> None:
        self.values: dict[PlaceId, ReachedValue] = {}
        self.changed: set[PlaceId] = set()
        self.in_use: set[PlaceId] = set()
        self._undo: dict[int, dict[PlaceId, Any]] = {}  # by batch
        self._before: dict[PlaceId, Any] = {}
        self._after: dict[PlaceId, Any] = {}
        self._shown: dict[PlaceId, Any] | None = None
        self._hidden: dict[PlaceId, Any] = {}

    def stop(self) -> None:
        """Forget all values."""
        self.values, self.changed, self._before, self._after = {}, set(), {}, {}
        self._shown, self._hidden = None, {}

    def _read(self) -> dict[PlaceId, Any]:
        return {place: value.read() for place, value in self.values.items()}

    def _differing(self, then: dict[PlaceId, Any], now: dict[PlaceId, Any]) -> set[PlaceId]:
        kept = then.keys() & now.keys() & self.values.keys()
        return {place for place in kept if not self.values[place].same(then[place], now[place])}

    def before(self) -> None:
        """The code ahead begins with a batch; on its thread."""
        self._before = self._read()

    def after(self, number: int) -> set[PlaceId]:
        """It has finished with the batch of this number; returns places of what it has changed."""
        self._after = self._read()
        changed = self._differing(self._before, self._after)
        self._undo[number] = {place: self._before[place] for place in changed}
        self.changed |= changed
        return changed

    def changed_beside(self, now: dict[PlaceId, Any] | None = None) -> set[PlaceId]:
        """Places of what was changed since the code ahead has finished, and not by it."""
        return self._differing(self._after, self._read() if now is None else now)

    def show(self, number: int = 0) -> None:
        """Undo what was changed for batches after this one; earlier ones are forgotten."""
        for old in [one for one in self._undo if one <= number]:
            del self._undo[old]
        self._shown = self._read()
        for later in sorted(self._undo, reverse=True):
            for place, then in self._undo[later].items():
                write = self.values[place].write
                if write is not None:
                    self._hidden.setdefault(place, self._shown[place])
                    self._shown[place] = then
        for place in self._hidden:
            self._set(place, self._shown[place])

    def _set(self, place: PlaceId, value: Any) -> None:
        write = self.values[place].write
        if write is not None:
            write(value)

    def changed_since(self, *, used: bool) -> set[str]:
        """Names of what was changed since ``show``.

        Args:
            used: Whether the code ahead may have used values for later batches. Generators count
                if it has drawn from them.
        """
        changed = self._differing(self._shown or {}, self._read() if self._shown else {})
        named = {place: self.values[place] for place in changed}
        return {
            value.name
            for place, value in named.items()
            if (place in self.in_use or place in self._hidden if value.is_generator else used)
        }

    def renew(self) -> None:
        """What was done since the code ahead has finished is put back, or does not matter."""
        self._after = self._read()

    def drop_later(self) -> None:
        """What is shown is all that was done: later batches are dropped."""
        self._undo.clear()
        self._shown, self._hidden = None, {}

    def hide(self) -> None:
        """Make the changes for later batches again."""
        if self._shown is None:
            return
        for place, latest in self._hidden.items():
            self._set(place, latest)
        self._shown, self._hidden = None, {}
        self.renew()
