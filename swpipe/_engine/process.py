"""The end of runs when the interpreter exits, and in a forked child.

    exit    stop all runs --> join, EXIT_GRACE_S --> raise Cancelled in what still runs --> join
            --> name the tasks that still run on standard error
    fork    the child has none of the threads: its runs count as ended, and nothing is waited for

A thread that returns from torch into an interpreter that no longer exists aborts the process. So
threads that run Python are ended before the interpreter is; a thread inside one long call stops
when the call returns. The exit code of the script does not change.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from typing import Any

from swpipe._distributed.rank_checks import rank_prefix
from swpipe.errors import write_error

EXIT_GRACE_S = 5.0
"""The time in seconds, in all, that the interpreter waits at its exit for running tasks."""

# The time in seconds for a task to end after an exception was raised in it.
_UNWIND_S = 1.0


# Objects of class ``Run``, whose module imports this one. It is not a WeakSet: an exception that a
# signal raises in the callback of a weak reference is lost.
_runs: dict[int, Any] = {}


def add_run(run: Any) -> None:
    """Register a run that starts."""
    for other in list(_runs.values()):
        remove_run(other)
    _runs[id(run)] = run


def remove_run(run: Any) -> None:
    """Remove a run that has ended, unless one of its tasks has not returned."""
    if run.ended and not run.left_inside():
        _runs.pop(id(run), None)


def end_all() -> None:
    """End the runs that were not closed, and wait for tasks that a failed run left running."""
    alive = list(_runs.values())
    for run in alive:
        run.stop()
    # A stalled run has had its time, and other ranks may be waiting for this process to end.
    _join([run for run in alive if run.stalled is None], EXIT_GRACE_S)
    for run in alive:
        run.cut_short()
    _join(alive, _UNWIND_S)
    inside = [left for run in alive for left in run.left_inside()]
    if inside:
        _let_threads_sleep()
    for left in inside:
        write_error(f"swpipe: {rank_prefix()}{left}; the interpreter exits without waiting for it")


def _let_threads_sleep() -> None:
    """Make C++ threads sleep that would otherwise abort the process.

    An interpreter that shuts down ends each thread that returns to it. If the thread is inside a
    destructor then, C++ calls ``std::terminate``. Python 3.14 lets these threads sleep.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.CDLL(None).pause)
    except (OSError, AttributeError):
        # Another C++ library than libstdc++.
        return


def _join(alive: list[Any], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for run in alive:
        run.join(max(0, deadline - time.monotonic()))


def forget_all() -> None:
    """Mark all runs as ended in a forked child, which has none of their threads."""
    for run in list(_runs.values()):
        run.forget_in_fork()
    _runs.clear()


atexit.register(end_all)
os.register_at_fork(after_in_child=forget_all)
