"""Ordering of threads in tests without sleeping."""

from __future__ import annotations

import threading
import time

PATIENCE_S = 60.0
"""How long a test waits for another thread before it fails."""


def await_event(event: threading.Event, what: str) -> None:
    """Wait for another thread's event, and fail rather than hang."""
    if not event.wait(PATIENCE_S):
        raise TimeoutError(f"{what} never happened")


def swpipe_threads(within_s: float = PATIENCE_S) -> list[str]:
    """Return the living threads of swpipe, after those that end had time to do so.

    A thread whose work is done, which is joined no longer, still counts for a moment.
    """
    deadline = time.monotonic() + within_s
    while names := [t.name for t in threading.enumerate() if t.name.startswith("swpipe-")]:
        if time.monotonic() > deadline:
            return names
        time.sleep(0.001)
    return []
