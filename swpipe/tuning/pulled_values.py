"""What the code of a loader can reach, as it was when each batch was pulled.

A loader may count batches, say which one is the last, or draw random numbers. What it changes goes
with its batch to the loop's body (``values_by_batch``). No task may use it, and no task may draw
from the generators that the loader draws from: ``swpipe.tuning.choice`` sees to it where this shows
in the code or with the first batches; what begins later is told here, by an error.

A loader with threads of its own changes things at any time: nothing of it is watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from swpipe.device import Device
from swpipe.inference.generators import TORCH
from swpipe.inference.reach import PlaceId, Reach, reach_of
from swpipe.tuning.loader_draws import TorchDraws
from swpipe.tuning.loader_parts import counters_of, reaching
from swpipe.tuning.reached_values import default_generators_of, is_threaded, values_in
from swpipe.tuning.values_by_batch import ValuesByBatch


@dataclass(frozen=True)
class Beside:
    """What runs beside the loader.

    Attributes:
        drawn: The default generators that tasks draw from, as effects name them.
        reaches: Task to what its code can reach, if it declares no state.
        seeded: Whether tasks with ``random=True`` run ahead: torch's generators have other states
            while they do, also while the body runs.
    """

    drawn: frozenset[str] = frozenset()
    reaches: Mapping[str, Reach] = field(default_factory=dict)
    seeded: bool = False


class PulledValues(ValuesByBatch):
    """The values that a loader can reach, in one pass.

    Attributes:
        reach: What the loader's code can reach.
        beside: What runs beside the loader.

    Args:
        loader: The loader.
        device: Whose random generators count.
        beside: What runs beside the loader; None if nothing does: then nothing is watched.
    """

    def __init__(self, loader: Any, device: Device, beside: Beside | None) -> None:
        super().__init__()
        self.beside = Beside()
        self.reach = Reach()
        self._loader = loader
        self._device = device
        self._watching = beside is not None
        self._draws: set[PlaceId] = set()  # generators that pulls but the first draw from
        self.search()
        self.run_beside(beside or Beside())
        self.before()

    def run_beside(self, beside: Beside) -> None:
        """Let these tasks run beside the loader from now on."""
        self.beside = beside
        self.in_use = {PlaceId(0, TORCH)} if beside.seeded else set()

    def search(self, *iterators: Any) -> None:
        """Find the values; an iterator that has begun leads to its local variables."""
        if not self._watching:
            return
        self.reach = reach_of(reaching(self._loader, *iterators))
        if is_threaded(self.reach):
            self.stop()
            return
        self.values |= default_generators_of(self._device) | counters_of(self._loader)
        self.values |= values_in(self.reach)

    def stop(self) -> None:
        """Watch nothing from now on."""
        self._watching = False
        super().stop()

    @property
    def modified(self) -> set[str]:
        """Names of tensors and arrays that pulls have modified in place."""
        return {self.values[p].name for p in self.changed if self.values[p].write is None}

    def before(self) -> None:
        """The next pull begins; on its thread.

        Raises:
            RuntimeError: Something else has changed what the loader uses.
        """
        super().before()
        self._check_beside(self.changed_beside(self._before))

    def after(self, number: int) -> set[PlaceId]:
        """Note what the pull of the batch with this number, from 1, has changed.

        Raises:
            RuntimeError: It changed something that a task uses.
        """
        if number > 1:
            for place in self._of_tasks:  # whoever has changed them
                self._before.pop(place, None)
        changed = super().after(number)
        if number > 1:
            self._draws |= {place for place in changed if self.values[place].is_generator}
        for place in changed:
            self._check_use(place, number)
        return changed

    def check(self) -> None:
        """Check that only pulls have changed what the loader uses; while nothing is pulled.

        Raises:
            RuntimeError: Something else has.
        """
        self._check_beside(self.changed_beside())

    @property
    def _of_tasks(self) -> set[PlaceId]:
        return {PlaceId(0, name) for name in self.beside.drawn}

    def _check_beside(self, places: set[PlaceId]) -> None:
        for place in places - self._of_tasks:
            value = self.values[place]
            if value.is_generator and place not in self._draws:
                continue
            raise RuntimeError(
                f"a task has changed {value.name} while batches were pulled ahead, and the loader "
                "uses it: they are not those of the plain loop. Change it between two passes; for "
                "random numbers, let the loader's workers draw (DataLoader(num_workers=1)), or "
                "give the task numbers of its own (PipelineTask(..., random=True))"
            )

    @contextmanager
    def watching_draws(self, number: int) -> Iterator[None]:
        """A block in which the batch with this number is pulled.

        Raises:
            RuntimeError: The loader draws from torch's default generators, and so do tasks.
        """
        if number == 1 or TORCH not in self.beside.drawn:
            yield
            return
        with TorchDraws() as draws:
            yield
        if draws.function:
            raise RuntimeError(
                f"the loader called {draws.function}() for batch {number - 1} of the pass, which "
                f"draws from {TORCH}, and tasks draw from them, too: the numbers would not be "
                "those of the plain loop. Let the loader's workers draw "
                "(DataLoader(num_workers=1)), or draw before the first batch of the pass, or give "
                "tasks numbers of their own (PipelineTask(..., random=True))"
            )

    def _check_use(self, place: PlaceId, number: int) -> None:
        for task, reach in self.beside.reaches.items():
            if place in reach.places or (not place.name and place.holder in reach.holders):
                raise RuntimeError(
                    f"the loader changed {self.values[place].name!r} with batch {number - 1} of "
                    f"the pass, and task {task!r} can use it: the task would find the value of a "
                    "batch that was pulled ahead. Let the loader give the value with its batch"
                )
