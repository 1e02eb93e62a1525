"""Functions that remove guards of a run, for the virtual device and for a GPU."""

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
    """Drop at once what an attribute held before it was deleted or overwritten."""

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
    """Drop a retired context without holding its memory."""
    patch.setattr(Run, "_hold", lambda run, iteration: None)


def waiting(patch: pytest.MonkeyPatch) -> None:
    """Free memory after the last task that uses it, without waiting for the device."""

    def add(place: WaitingMemory, i: int, values: list[Any]) -> None:
        place._device.take_over(values, place._iterations.all_streams)

    patch.setattr(WaitingMemory, "add", add)


def hold_on_shared(patch: pytest.MonkeyPatch) -> None:
    """Treat released memory as unused, even if others refer to it."""
    for kind in (AcceleratorDevice, VirtualDevice):
        patch.setattr(kind, "take_over", lambda device, values, streams: _taken(values))


def _taken(values: list[Any]) -> list[Any]:
    taken, values[:] = [*values], []
    return taken


def back_pressure(patch: pytest.MonkeyPatch) -> None:
    """Let the host run ahead of the device without a limit."""
    patch.setattr(admission.Admission, "_await_device", lambda own, before: None)
