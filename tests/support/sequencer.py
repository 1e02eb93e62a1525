"""Order threads in tests without sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 20.0
"""How long a test waits for another thread before it fails."""


class Sequencer:
    """Blocks run in the order of their numbers, whatever threads they are on."""

    def __init__(self) -> None:
        self._turn = 0
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, turn: int) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == turn, PATIENCE_S):
                raise TimeoutError(f"turn {turn} never came; the last was {self._turn}")
        yield
        with self._changed:
            self._turn = turn + 1
            self._changed.notify_all()


def await_event(event: threading.Event, what: str) -> None:
    """Wait for another thread's event, and fail rather than hang."""
    if not event.wait(PATIENCE_S):
        raise TimeoutError(f"{what} never happened")


def swpipe_threads(within_s: float = PATIENCE_S) -> list[str]:
    """Threads of swpipe's that are alive, when those that end have had time to.

    One whose work is done, so that nobody waits for it any more, is still counted for a moment.
    """
    deadline = time.monotonic() + within_s
    while names := [t.name for t in threading.enumerate() if t.name.startswith("swpipe-")]:
        if time.monotonic() > deadline:
            return names
        time.sleep(0.001)
    return []
