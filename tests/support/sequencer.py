"""Order threads in tests without sleeping."""

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
    """Threads of swpipe's that are alive, when those that end have had time to.

    One whose work is done, so that nobody waits for it any more, is still counted for a moment.
    """
    deadline = time.monotonic() + within_s
    while names := [t.name for t in threading.enumerate() if t.name.startswith("swpipe-")]:
        if time.monotonic() > deadline:
            return names
        time.sleep(0.001)
    return []
