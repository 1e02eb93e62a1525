"""Events with a meaning: the task and the iteration that they were recorded after.

A stream that waits for an event with a different meaning than in the program waits for the wrong
work, even if that does no harm in this run.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from swpipe._engine.waiting import Host
from swpipe.program import Instruction
from tests.device.virtual import EventReused, VirtualDevice, VirtualEvent, VirtualStream


class Place(NamedTuple):
    """The position of a thread in its lane."""

    ins: Instruction
    iteration: int


class MeantDevice(VirtualDevice):
    """A virtual device that knows the position of each thread, and thus the meaning of events.

    The positions come from the engine, which it observes; without observation events have no
    meaning.
    """

    def __init__(self, seed: int, host: Host | None = None) -> None:
        super().__init__(seed, host)
        self._places = threading.local()

    @property
    def place(self) -> Place | None:
        """The position of the calling thread."""
        place: Place | None = getattr(self._places, "place", None)
        return place

    def arrive(self, ins: Instruction, iteration: int) -> None:
        self._places.place = Place(ins, iteration)

    def start(self, ins: Instruction, iteration: int) -> None:
        return None

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        return None

    def leave(self) -> None:
        """Record that the calling thread is in no lane."""
        self._places.place = None

    def new_event(self, *, timing: bool = False) -> MeantEvent:
        return MeantEvent(self)


class MeantEvent(VirtualEvent):
    """An event that reports a wait for a meaning that it does not have."""

    def __init__(self, device: MeantDevice) -> None:
        super().__init__(device)
        self._of = device
        self._meaning: tuple[str, int] | None = None

    def record(self, stream: VirtualStream) -> None:
        super().record(stream)
        place = self._of.place
        self._meaning = None if place is None else (place.ins.task, place.iteration)

    def wait(self, stream: VirtualStream) -> None:
        super().wait(stream)
        place = self._of.place
        if place is None or self._meaning is None:
            return
        meant = [(w.producer, place.iteration - w.distance) for w in place.ins.event_waits]
        meant.append((place.ins.task, place.iteration))  # recorded at this very place: a run ends
        if self._meaning not in meant:
            self._of.report(
                EventReused(
                    f"{place.ins.task} of iteration {place.iteration} waits for an event of "
                    f"{self._meaning}, and is to wait for {meant}"
                )
            )
