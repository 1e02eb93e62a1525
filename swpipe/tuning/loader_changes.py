"""What the first two batches of a loader show: what it can reach, changes, and draws from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swpipe._state.generators import NUMPY, PYTHON, TORCH
from swpipe._state.kinds import CONTAINERS
from swpipe._state.reach import reach_of
from swpipe._state.reached import PlaceId, Reach
from swpipe.device import Device
from swpipe.inference.loader_code import drawing, reaching
from swpipe.tuning.loader_parts import goes_on, may_draw
from swpipe.tuning.reached_values import (
    ReachedValue,
    ReachedValues,
    counters_of,
    default_generators_of,
)
from swpipe.tuning.shown_values import ShownValues


class LoaderChanges:
    """Made before the loader is begun.

    Attributes:
        reach: What the loader's code can reach; an iterator leads to its local variables.
        draws: The same of the code that may draw random numbers with any batch.
        changed: Places of what it has changed, with their names.
        values: What it can reach, and the default generators.
    """

    def __init__(self, loader: Any, device: Device) -> None:
        self._loader, self._device = loader, device
        self._generators = default_generators_of(device, (TORCH, PYTHON, NUMPY))
        wrapped = type(loader).__module__.partition(".")[0] not in ("torch", "accelerate")
        self._others = self._generators | (counters_of(loader) if wrapped else {})
        self.changed: dict[PlaceId, str] = {}
        self._may_draw: set[str] | None = None
        self.look()
        self._by_batch = {0: self.values.read()}

    def look(self, *iterators: Any) -> None:
        """Find what it can reach now; with the iterators of a pass that has begun, their objects.

        A sampler that has begun has drawn its seed, and is no code that may draw with any batch.
        """
        self.reach = reach_of(reaching(self._loader, *iterators))
        self.values = ReachedValues([self.reach], self._others)
        if not iterators:
            self.draws = reach_of(drawing(self._loader))
            if self._may_draw is None or not goes_on(self._loader):
                self._may_draw = may_draw(self.draws)

    def forget(self) -> None:
        """Hold nothing of what was found, which the loader may let go."""
        self.reach, self.draws, self.values = Reach(), Reach(), ReachedValues(())

    def note_batch(self, iterator: Any) -> None:
        """One more batch was pulled, by an iterator that the loader has made."""
        number = len(self._by_batch)
        self.changed |= self.values.changed(self._by_batch[number - 1])
        if number == 1:  # before it samplers draw their seed
            self.changed = {
                p: name for p, name in self.changed.items() if p not in self._generators
            }
            self.look(iterator)
        self._by_batch[number] = self.values.read()

    def renew(self) -> None:
        """The values were restored after a recording: version counters have moved."""
        self._by_batch[len(self._by_batch) - 1] = self.values.read()

    @property
    def generators(self) -> dict[PlaceId, ReachedValue]:
        """The default generators that it draws from, or may draw from, with any batch."""
        may = self._may_draw or set()
        return {
            p: one for p, one in self._generators.items() if one.name in may or p in self.changed
        }

    @property
    def modified(self) -> set[str]:
        """Names of tensors and arrays that it has modified in place, and the like."""
        values = self.values.values
        return {n for p, n in self.changed.items() if p in values and values[p].write is None}

    def used_by(self, reaches: Mapping[str, Reach]) -> dict[str, str]:
        """Task to the name of something that the loader has changed and the task can use."""
        return {
            task: name
            for task, reach in reaches.items()
            for place, name in self.changed.items()
            if place in reach.places or (not place.name and place.holder in reach.holders)
        }

    def may_be_used_by(self, reaches: Mapping[str, Reach]) -> dict[str, str]:
        """The same of what the loader's code may change."""
        own = self.reach
        changeable = {
            place: path
            for place, path in own.places.items()
            if (place.name or isinstance(own.holders[place.holder], CONTAINERS))
            and place not in own.inner
            and own.may_change(place)
        }
        return {
            task: path
            for task, reach in reaches.items()
            for place, path in changeable.items()
            if place in reach.places
        }

    def shown(self) -> ShownValues:
        """What it has changed, or may change, to be shown with its batches."""
        return ShownValues(self.shown_values(), self._by_batch)

    def shown_values(self) -> dict[PlaceId, ReachedValue]:
        """The values that ``shown`` has, of the objects that it can reach now."""
        paths = {*self.changed.values()} - {""}
        return {
            place: one
            for place, one in self.values.values.items()
            if place in self.changed
            or place in self.generators
            or (place not in self._generators and (one.name in paths or self._changes(place)))
        }

    def _changes(self, place: PlaceId) -> bool:
        """Whether its code assigns to the place, or modifies the container by a name."""
        own = self.reach
        called = own.called.get(place.holder, set()) if not place.name else set()
        return place.name in own.stores or not called.isdisjoint(own.modifies - {""})
