"""The interruption of a thread that waits forever, and the end of its rank if that fails.

It is used by the watchdog of a run and by the limit on pulls over several ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

from swpipe._distributed.rank_checks import (
    abort_process_groups,
    is_alone,
    rank_prefix,
    tell_failure,
)
from swpipe.errors import StallError, write_error

GRACE_S = 2.0
"""The time in seconds in which an interrupted caller has to leave its task."""

STALL_EXIT_CODE = 70
"""The exit code of a rank that could not be interrupted."""

LOOK_COUNTS_AT_MOST = 2.0
"""The greatest idle time that one look can add, in intervals.

A process that was stopped looks once when it continues; the time of the stop must not count.
"""


def end_thread(ident: int, error: RuntimeError, has_left: Callable[[], bool]) -> None:
    """Interrupt a thread; if it stays in its call and is one of several ranks, end the process.

    Args:
        ident: The thread to interrupt.
        error: The reason, which the other ranks are told.
        has_left: Returns, within ``GRACE_S``, whether the thread has left its call.
    """
    # Report to the other ranks before the wait: they may be waiting for this rank's collective.
    interrupt(ident)
    tell_failure(error)
    if is_alone() or has_left():
        return
    prefix = rank_prefix()
    # A collective that is aborted returns with an error. A call that still waits is no collective.
    abort_process_groups(GRACE_S)
    if not has_left():
        for note in getattr(error, "__notes__", ()):
            write_error(note)
        write_error(
            f"swpipe: {prefix}the call has not returned: this process exits with code "
            f"{STALL_EXIT_CODE}, so that the other ranks do not wait for it"
        )
        os._exit(STALL_EXIT_CODE)


def interrupt(ident: int) -> None:
    """Raise KeyboardInterrupt (by SIGINT) in the main thread, or ``StallError`` in another.

    If the user has replaced the handler of SIGINT, the main thread gets a ``StallError`` too.
    """
    main = threading.main_thread().ident
    if ident == main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # ``siginterrupt`` makes blocking calls end with EINTR, as Python's own handlers do. A
        # library that hooks SIGINT (polars, at its first query) makes them continue instead.
        signal.siginterrupt(signal.SIGINT, True)
        signal.pthread_kill(ident, signal.SIGINT)
    else:
        raise_in(ident, StallError)


def raise_in(ident: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
