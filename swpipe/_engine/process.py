"""What becomes of runs when the interpreter exits, and in a forked child.

    exit    stop all runs --> join, EXIT_GRACE_S --> raise Cancelled in what still runs --> join
            --> name on standard error what is left
    fork    the child has none of the threads: its runs count as ended, and nothing is waited for

A thread that returns from torch into an interpreter that no longer exists aborts the process. So
what still runs Python is ended before that; what is inside one long call gets no further. The
script's exit code stays its own.
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
"""How long the interpreter waits, in all, for tasks that still run when it exits."""

_UNWIND_S = 1.0  # for a task that an exception was raised in


_runs: dict[int, Any] = {}  # of class ``Run``, which is above this module
# Not a WeakSet: an exception that a signal raises in the callback of a weak reference is lost.


def add_run(run: Any) -> None:
    """Account for a run that starts."""
    for other in list(_runs.values()):
        remove_run(other)
    _runs[id(run)] = run


def remove_run(run: Any) -> None:
    """Forget a run that has ended, unless a task of it has not returned."""
    if run.ended and not run.left_inside():
        _runs.pop(id(run), None)


def end_all() -> None:
    """End what nobody closed, and wait for tasks that a failed run left running."""
    alive = list(_runs.values())
    for run in alive:
        run.stop()
    # What stalled has had its time, and other ranks may be waiting for this process to end.
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
    """Have C++ threads sleep that would abort the process.

    An interpreter that shuts down ends each thread that comes back to it. Where that is inside a
    destructor, C++ calls ``std::terminate``. Python 3.14 lets such threads sleep.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.CDLL(None).pause)
    except (OSError, AttributeError):  # another system's C++
        return


def _join(alive: list[Any], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for run in alive:
        run.join(max(0, deadline - time.monotonic()))


def forget_all() -> None:
    """In a child process, end all runs without their threads."""
    for run in list(_runs.values()):
        run.forget_in_fork()
    _runs.clear()


atexit.register(end_all)
os.register_at_fork(after_in_child=forget_all)
