"""One call at a time may run a pipeline, and none once it is closed."""

from __future__ import annotations

import threading

from swpipe._engine.randomness import LentAccess, lend_access, this_thread


class ExclusiveAccess:
    """Lets one ``with`` block in at a time; another one raises instead of waiting."""

    __slots__ = ("_lent", "_lock", "closed")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: LentAccess | None = None
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise RuntimeError("the pipeline is closed: make a new one")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "the pipeline is in use already, by another thread or by one of its own tasks: "
                "make one call at a time"
            )
        self._lent = None if this_thread.access is None else lend_access()

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        try:
            if self._lent is not None:
                self._lent.take_back(kind)
        finally:
            self._lock.release()
