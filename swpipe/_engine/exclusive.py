"""Exclusive use of a pipeline: one call at a time, and none once the pipeline is closed.

    progress()  enters: holder = its frame ......... leaves: holder = None
    close()     sets ``closed``, reads the holder:   a call under way cleans up when it leaves;
                                                     without one, close() cleans up itself

A holder counts only while its frame is executed. An exception that arrives between any two steps of
entering and leaving (Ctrl-C) can thus not lock a pipeline: the next call finds a frame that is no
longer executed, and takes over. The first operation of a dictionary decides between two that enter
at once. Only who takes over needs a lock: it is reentrant, since a signal handler may come in
between, and nothing waits while holding it.

A check of tasks is a dispatch mode of torch on the task's thread. An interrupt can leave the mode
active after the task, so a call that leaves removes such modes from the caller's thread.
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


# The number of forks between the first process and this one.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def only_watches(count: int) -> bool:
    """Return whether the innermost of ``count`` dispatch modes only watches a task."""
    # ``torch._C._get_dispatch_stack_at`` is private (torch 2.13); index 0 is the outermost mode.
    return getattr(torch._C._get_dispatch_stack_at(count - 1), "only_watches", False)


def is_executed(frame: FrameType) -> bool:
    """Return whether some thread executes the frame of a function that is not a generator.

    If not, the frame's local variables are cleared. A search in the stacks of all threads is not
    possible: CPython 3.11 crashes if ``sys._current_frames`` finds a frame that its own thread is
    just clearing.
    """
    try:
        frame.clear()
    except RuntimeError:  # documented: a frame that is executed cannot be cleared
        return True
    return False


class ExclusiveAccess:
    """A guard that admits one call at a time; another call raises instead of waiting."""

    def __init__(self) -> None:
        # The number of forks after which the pipeline is open: a fork closes it. None once closed.
        self._open_after: int | None = _forks
        self._made_after = _forks
        # At most one entry: the frame and the thread of the call under way.
        self._holders: dict[str, tuple[FrameType, int]] = {}
        # The number of dispatch modes on the caller's thread when the call began.
        self._modes = 0
        self._lock = threading.RLock()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the pipeline."""
        return self._made_after != _forks

    @property
    def closed(self) -> bool:
        """Whether no call is admitted any more."""
        return self._open_after != _forks

    def close(self) -> None:
        """Admit no further call."""
        self._open_after = None

    def enter(self, frame: FrameType) -> None:
        """Begin a call, which lasts while ``frame`` is executed, or until ``leave``."""
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
        """Begin a call even if the pipeline is closed; return False while another is under way."""
        mine = frame, threading.get_ident()
        if self._holders.setdefault("call", mine) is mine or self._take_over(mine):
            self._modes = torch._C._len_torch_dispatch_stack()
            return True
        return False

    def _take_over(self, mine: tuple[FrameType, int]) -> bool:
        """Replace a call that was interrupted; return False while a call is under way."""
        holder = self._holders.get("call")
        if holder is not None:
            if is_executed(holder[0]):
                return False
            with self._lock:
                if self._holders.get("call") is holder:
                    del self._holders["call"]
        return self._holders.setdefault("call", mine) is mine

    def leave(self) -> bool:
        """End the call, and return whether the pipeline is still open."""
        while (count := torch._C._len_torch_dispatch_stack()) > self._modes and only_watches(count):
            torch._C._pop_torch_dispatch_stack(None)
        self._holders.clear()
        return self._open_after == _forks

    def holder(self) -> int | None:
        """Return the ``ident`` of the thread whose call is under way; None if there is none."""
        holder = self._holders.get("call")
        return holder[1] if holder is not None and is_executed(holder[0]) else None
