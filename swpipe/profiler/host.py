"""Host times of tasks: how long each occupies its thread, and how long that thread is off the CPU.

A thread is off the CPU because it waits for something, or because it waits for a core that other
threads use. Linux counts the second case (``schedstat``), so the first one follows.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import sub
from statistics import fmean
from typing import NamedTuple

from swpipe._engine.observers import Observer
from swpipe.core.plan import PULL
from swpipe.core.task import TaskRef, names_of
from swpipe.profiler.spread import Estimate, mean_of_loop
from swpipe.program import Instruction


class HostRun(NamedTuple):
    """One run of a task, in seconds; during ``core_s`` its thread waited for a core."""

    iteration: int
    wall_s: float
    cpu_s: float
    core_s: float = 0.0


def thread_times() -> tuple[float, float, float]:
    """Return the wall time, this thread's CPU time, and its time waiting for a core, in seconds."""
    return time.perf_counter(), time.thread_time(), core_wait_s()


def core_wait_s() -> float:
    """Return how many seconds this thread has waited for a core; 0 if the kernel does not count."""
    # ``/proc/thread-self`` is resolved when the file is opened, so each thread keeps its own file.
    # After a fork, the file is the parent's.
    if getattr(_FILE, "pid", -1) != os.getpid():
        _FILE.pid = os.getpid()
        _FILE.number = -1
        with suppress(OSError):  # not Linux, or a kernel that does not count
            _FILE.number = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(threading.current_thread(), os.close, _FILE.number)
    # Time on a core, time waiting for one, turns: the second is in nanoseconds.
    return int(os.pread(_FILE.number, 64, 0).split()[1]) / 1e9 if _FILE.number >= 0 else 0.0


_FILE = threading.local()


class HostObserver(Observer):
    """An observer of ``tasks``. Each has its own list, to which one thread at a time writes.

    ``clock`` returns the wall time and the CPU time; by default those of the task's own thread.
    """

    def __init__(
        self, tasks: Iterable[TaskRef], clock: Callable[[], tuple[float, ...]] = thread_times
    ) -> None:
        self.runs: dict[str, list[HostRun]] = {name: [] for name in names_of(tasks)}
        self._clock = clock
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        self._local.begin = self._clock()

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        now = self._clock()
        runs = self.runs.get(ins.task)
        # ``begin`` is missing if observation began while the task ran.
        begin = self._local.__dict__.pop("begin", None)
        if runs is not None and begin is not None:
            runs.append(HostRun(iteration, *map(sub, now, begin)))

    def timed(self, steps_s: Mapping[int, float], calls: Sequence[HostRun]) -> list[TimedIteration]:
        """Return the iterations of which the times are given, by number, with their runs.

        ``calls`` are the loader's calls. Under a plan, the loader is called for iterations that are
        retired later, so its calls are matched with the iterations by order only.
        """
        runs: dict[int, dict[str, HostRun]] = {number: {} for number in steps_s}
        for number, call in zip(steps_s, calls, strict=False):
            runs[number][PULL] = call
        for name, of in self.runs.items():
            for run in of:
                if run.iteration in runs:
                    runs[run.iteration][name] = run
        return [TimedIteration(number, step_s, runs[number]) for number, step_s in steps_s.items()]


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """The times of a task on its thread; mean seconds per iteration.

    Attributes:
        host_s: How long the task occupies its thread; slow runs count in full.
        blocked_s: The part of ``host_s`` in which the thread waits off the CPU: it sleeps, or waits
            for a file, a lock or a device. A thread that waits in a busy loop (the default in CUDA)
            is on the CPU.
        core_s: The part of ``host_s`` in which the thread could run, but other threads had the
            cores.
        error_s: The standard error of ``host_s``, at most ``host_s``.
        each_s: ``host_s`` in each iteration, in order.
    """

    host_s: float
    blocked_s: float = 0.0
    core_s: float = 0.0
    error_s: float = 0.0
    each_s: tuple[float, ...] = ()

    @property
    def host(self) -> Estimate:
        """The mean ``host_s`` with its interval, of two standard errors."""
        return Estimate(self.host_s, 2 * self.error_s)

    @property
    def cpu_s(self) -> float:
        """How long the thread is on the CPU."""
        # The wait for a core is counted by another clock, which may exceed the run by its steps.
        return max(0.0, self.host_s - self.blocked_s - self.core_s)


class TimedIteration(NamedTuple):
    """An iteration that was timed, with the run of each task; the loader's call is the first."""

    number: int
    step_s: float
    runs: Mapping[str, HostRun]


def times_of(iterations: Iterable[TimedIteration]) -> dict[str, ThreadTimes]:
    """Return the times of each task in these iterations, in their order."""
    runs: dict[str, list[HostRun]] = defaultdict(list)
    for iteration in iterations:
        for name, run in iteration.runs.items():
            runs[name].append(run)
    return {name: _times(of) for name, of in runs.items()}


def _times(runs: Sequence[HostRun]) -> ThreadTimes:
    host_s, cpu_s, core_s = (fmean(part) for part in list(zip(*runs, strict=True))[1:])
    each_s = tuple(run.wall_s for run in runs)
    # The error is that of the means of parts: successive runs are correlated, so that counting
    # each run would make the error too small. A single run is as uncertain as it is long.
    error_s = mean_of_loop(each_s, cycle=1).spread_s / 2 if len(runs) > 1 else host_s
    return ThreadTimes(
        host_s,
        # Means over all runs are subtracted, not single runs: some systems count CPU time in
        # steps of milliseconds.
        blocked_s=max(0.0, host_s - cpu_s - core_s),
        core_s=core_s,
        error_s=min(error_s, host_s),
        each_s=each_s,
    )
