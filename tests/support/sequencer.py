"""Order threads in tests without sleeping."""

from __future__ import annotations

import threading
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
