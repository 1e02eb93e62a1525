"""One call at a time may run a pipeline, and none once it is closed."""

from __future__ import annotations

import threading


class ExclusiveAccess:
    """Lets one ``with`` block in at a time; another one raises instead of waiting."""

    __slots__ = ("_lock", "closed")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise RuntimeError("the pipeline is closed: make a new one")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "the pipeline is in use already, by another thread or by one of its own tasks: "
                "make one call at a time"
            )

    def __exit__(self, *failure: object) -> None:
        self._lock.release()
