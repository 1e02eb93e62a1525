"""Guards of a run taken away, for tests on the virtual device and on a GPU alike."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe._engine import admission
from swpipe._engine.iterations import InFlight
from swpipe._engine.release import WaitingMemory
from swpipe._engine.run import Run
from swpipe.device import AcceleratorDevice
from tests.device.virtual import VirtualDevice


def hold_on_dropped(patch: pytest.MonkeyPatch) -> None:
    """What an attribute held before it was deleted or overwritten is dropped at once."""

    class Forgetful(list[object]):
        def append(self, value: object) -> None:
            return None

    class Careless(InFlight):
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.held = Forgetful()

    patch.setattr(admission, "InFlight", Careless)


def hold_at_retirement(patch: pytest.MonkeyPatch) -> None:
    """A retired context goes without waiting for those who still read it."""
    patch.setattr(Run, "_hold", lambda run, iteration: None)


def waiting(patch: pytest.MonkeyPatch) -> None:
    """As if the device could not still use what no task will use again."""

    def add(place: WaitingMemory, i: int, values: list[Any]) -> None:
        place._device.take_over(values, place._iterations.all_streams)

    patch.setattr(WaitingMemory, "add", add)


def hold_on_shared(patch: pytest.MonkeyPatch) -> None:
    """Memory that went is taken for unused, though others than the context refer to it."""
    for kind in (AcceleratorDevice, VirtualDevice):
        patch.setattr(kind, "take_over", lambda device, values, streams: _taken(values))


def _taken(values: list[Any]) -> list[Any]:
    taken, values[:] = [*values], []
    return taken


def back_pressure(patch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of the device as far as it likes."""
    patch.setattr(admission.Admission, "_await_device", lambda own, before: None)
