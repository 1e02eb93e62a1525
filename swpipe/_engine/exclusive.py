"""One call at a time may use a pipeline, and none once it is closed.

    progress()  enters: holder = its frame ......... leaves: holder = None
    close()     sets ``closed``, reads the holder:   a call under way cleans up when it leaves;
                                                     without one, close() cleans up itself

A holder counts only while its frame is executed. An exception that arrives between any two steps of
entering and leaving (Ctrl-C) can thus not lock a pipeline: the next call finds a frame that is no
longer executed, and takes over. The first operation of a dictionary decides between two that enter
at once. Only who takes over needs a lock: it is reentrant, since a signal handler may come in
between, and nothing waits while holding it.

What watches a task is a mode of torch's on its thread. An interrupt can keep it there, after the
task; so a call that leaves takes away what it has left on the caller's thread.
"""

from __future__ import annotations

import os
import threading
from types import FrameType

import torch

CLOSED = "the pipeline is closed: make a new one"
FORKED = (
    "the pipeline is closed: this process was forked from the one that made it, and a fork has no "
    "threads but its own: make a new one here"
)


_forks = 0  # between the first process and this one


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def only_watches(count: int) -> bool:
    """Whether the innermost of so many dispatch modes only watches what a task does."""
    return getattr(torch._C._get_dispatch_stack_at(count - 1), "only_watches", False)


def is_executed(frame: FrameType) -> bool:
    """Whether some thread executes the frame of a function, which must not be a generator's.

    If not, its local variables are cleared. Searching all threads' stacks for the frame is no way:
    CPython 3.11 crashes if ``sys._current_frames`` finds one that its own thread is just clearing.
    """
    try:
        frame.clear()
    except RuntimeError:  # documented: a frame that is executed cannot be cleared
        return True
    return False


class ExclusiveAccess:
    """Lets one call in at a time; another one raises instead of waiting."""

    def __init__(self) -> None:
        self._open_after: int | None = _forks  # of how many forks; None once closed
        self._made_after = _forks
        self._holders: dict[str, tuple[FrameType, int]] = {}  # one at most
        self._modes = 0  # of torch's dispatch, on the caller's thread, when the call began
        self._lock = threading.RLock()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the pipeline."""
        return self._made_after != _forks

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._open_after != _forks

    def close(self) -> None:
        """Let no further call in."""
        self._open_after = None

    def enter(self, frame: FrameType) -> None:
        """Begin a call; it lasts for as long as ``frame`` is executed, or until ``leave``."""
        entered = self.enter_to_close(frame)
        # After the holder is set: either close() sees this call, or this call sees that it closed.
        if self._open_after != _forks:
            if entered:
                self._holders.clear()
            raise RuntimeError(FORKED if self.forked else CLOSED)
        if not entered:
            raise RuntimeError(
                "the pipeline is in use already, by another thread or by one of its own tasks: "
                "make one call at a time"
            )

    def enter_to_close(self, frame: FrameType) -> bool:
        """Begin a call though the pipeline is closed; False while another is under way."""
        mine = frame, threading.get_ident()
        if self._holders.setdefault("call", mine) is mine or self._take_over(mine):
            self._modes = torch._C._len_torch_dispatch_stack()
            return True
        return False

    def _take_over(self, mine: tuple[FrameType, int]) -> bool:
        """Enter in the place of a call that was cut short; False while one is under way."""
        holder = self._holders.get("call")
        if holder is not None:
            if is_executed(holder[0]):
                return False
            with self._lock:
                if self._holders.get("call") is holder:
                    del self._holders["call"]
        return self._holders.setdefault("call", mine) is mine

    def leave(self) -> bool:
        """End the call; whether the pipeline is still open."""
        while (count := torch._C._len_torch_dispatch_stack()) > self._modes and only_watches(count):
            torch._C._pop_torch_dispatch_stack(None)
        self._holders.clear()
        return self._open_after == _forks

    def holder(self) -> int | None:
        """The thread, by ``ident``, of the call that is under way; None if there is none."""
        holder = self._holders.get("call")
        return holder[1] if holder is not None and is_executed(holder[0]) else None
