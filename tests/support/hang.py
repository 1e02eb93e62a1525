"""A place for a thread to hang in, and a host that knows of it, however busy the machine is.

    task       hangs ------------------------------------> release
    watchdog         looks: nothing has moved for an hour
    the end          waits for every thread but the one that hangs

The watchdog's clock stands still while nobody hangs, so that it takes no slow thread for a stalled
one. Of a run that ends, the threads that can end are waited for as long as they need. A caller that
hangs is let go by the watchdog's interrupt, which has come by then, and so is not awaited.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

import swpipe._engine.run
import swpipe._engine.watchdog
from swpipe._engine.waiting import Host, HostThread
from swpipe.pipeline import SWPipeline
from tests.support.sequencer import PATIENCE_S

HOUR_S = 3600.0


class Hang(Host):
    """A place where the first thread that comes hangs, until it is released.

    Args:
        monkeypatch: The watchdog gets its time from here.
        noticed: Further, what must be so before the clock runs on.

    Attributes:
        inside: Somebody hangs, or has.
        release: Lets go of who does.
        looks: The number of looks of the watchdog during the hang.
        noticed: See the argument.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, noticed: Callable[[], bool] = lambda: True
    ) -> None:
        monkeypatch.setattr(swpipe._engine.watchdog, "time", self)
        monkeypatch.setattr(swpipe._engine.watchdog, "LOOK_COUNTS_AT_MOST", math.inf)
        monkeypatch.setattr(swpipe._engine.run, "_LEAVE_S", 0.0)
        self.inside, self.release = threading.Event(), threading.Event()
        self.looks = 0
        self.noticed = noticed
        self._ident: int | None = None

    def hang(self) -> None:
        """Hang until the release; return at once if a thread has been here before."""
        if not self.inside.is_set():
            self._ident = threading.get_ident()
            self.inside.set()
            self.release.wait()

    def monotonic(self) -> float:
        """Return the time: an hour more at each look while a thread hangs."""
        if self.inside.is_set() and not self.release.is_set() and self.noticed():
            self.looks += 1
        return HOUR_S * self.looks

    def start(self, name: str, target: Callable[[], None]) -> HostThread:
        return _Known(super().start(name, target), self)

    def holds(self, thread: HostThread) -> bool:
        """Return whether this thread hangs."""
        return thread.ident == self._ident and not self.release.is_set()


class _Known:
    def __init__(self, thread: HostThread, hang: Hang) -> None:
        self._thread = thread
        self._hang = hang

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread without a limit, unless it hangs."""
        if not self._hang.holds(self._thread):
            self._thread.join(PATIENCE_S)

    def is_alive(self) -> bool:
        return self._thread.is_alive()


def has_come_to(pipe: SWPipeline, group: str, task: str, iteration: int) -> bool:
    """Return whether a thread group has reached a task's turn on an iteration."""
    run = pipe._driver.run
    lanes = () if run is None else run.lanes
    return any(
        (lane.group, lane.instruction.task, lane.period - lane.instruction.stage)
        == (group, task, iteration)
        for lane in lanes
    )
