"""Values that a loader changes with each batch: the loop's body finds those of its own batch.

    pulled    batch 2   batch 3   batch 4
    caller                        show 1   body 1   hide    show 2   body 2   hide

A loader may count batches, say which one is the last, or draw random numbers. Pulled ahead, it has
done so for later batches. So the values are kept for each batch, set before the body to what they
were after the body's batch, and set back afterwards. The loader is called only while the caller is
in a call of the pipeline, and so never beside the body. Tasks do not use the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swpipe._state.reached import PlaceId
from swpipe.tuning.reached_values import ReachedValue


class ShownValues:
    """Some values, by batch.

    Args:
        values: The values.
        known: Number of batches pulled to what the values were then.
        look: Finds the values when the first batch was pulled; None for those that are given.
    """

    def __init__(
        self,
        values: Mapping[PlaceId, ReachedValue],
        known: Mapping[int, Mapping[PlaceId, Any]],
        look: Callable[[], Mapping[PlaceId, ReachedValue]] | None = None,
    ) -> None:
        self._values = values
        self._by_batch = dict(known)
        self._look = look
        self._latest: dict[PlaceId, Any] = {}

    def begin(self) -> None:
        """A new pass begins: what is shown is what there is."""
        self._by_batch, self._latest = {}, {}

    def remember(self, pulled: int) -> None:
        """What there is goes with the batch of this number."""
        if self._look is not None and not self._by_batch:
            self._values = self._look()
        self._by_batch[pulled] = self._read()

    def show(self, number: int) -> None:
        """Let the body find what goes with its batch; earlier ones are forgotten."""
        for old in [one for one in self._by_batch if one < number]:
            del self._by_batch[old]
        if number in self._by_batch:
            self._latest = self._read()
            self._write(self._by_batch[number])

    def hide(self) -> None:
        """Let the loader find what it left."""
        self._write(self._latest)
        self._latest = {}

    def _read(self) -> dict[PlaceId, Any]:
        values = self._values.items()
        return {place: value.read() for place, value in values if value.write is not None}

    def _write(self, found: Mapping[PlaceId, Any]) -> None:
        for place, content in found.items():
            write = self._values[place].write if place in self._values else None
            if write is not None:
                write(content)
