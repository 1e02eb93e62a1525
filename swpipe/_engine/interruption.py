"""How a thread that waits for ever is interrupted, and how its rank ends if it cannot be.

For whoever limits a time: the watchdog of a run, and the limit on pulls over several ranks.
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
"""How long a caller that was interrupted has to leave its task."""

STALL_EXIT_CODE = 70
"""With what a rank exits that nothing else ends."""

LOOK_COUNTS_AT_MOST = 2.0
"""How many intervals one look can add: a process that was stopped looks once when it continues."""


def end_thread(ident: int, error: RuntimeError, has_left: Callable[[], bool]) -> None:
    """Interrupt a thread, and end the process if it is a rank and nothing else ends the call.

    Args:
        ident: The thread.
        error: Why.
        has_left: Returns, within ``GRACE_S``, whether the thread has left the call that it is in.
    """
    interrupt(ident)
    tell_failure(error)
    if is_alone() or has_left():
        return
    prefix = rank_prefix()
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
    """Raise an exception in a thread: that of SIGINT in the main thread, or a ``StallError``."""
    main = threading.main_thread().ident
    if ident == main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's handlers end blocking calls; libraries that hook SIGINT (polars does, at its
        # first query) let such calls go on instead.
        signal.siginterrupt(signal.SIGINT, True)
        signal.pthread_kill(ident, signal.SIGINT)
    else:
        raise_in(ident, StallError)


def raise_in(ident: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
