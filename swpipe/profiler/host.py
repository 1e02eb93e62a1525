"""Host times of tasks: how long each occupies its thread, and how long that thread is off the CPU.

A thread is off the CPU because it waits for something, or because it waits for a core that other
threads use. Linux counts the second case (``schedstat``), so the first one follows.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from operator import sub
from statistics import fmean, stdev
from typing import NamedTuple

from swpipe._engine.observers import Observer
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
    file: _SchedStat | None = getattr(_FILES, "file", None)
    if file is None or file.pid != os.getpid():  # after a fork, the file is the parent's
        file = _FILES.file = _SchedStat()
    return file.read_s()


class _SchedStat:
    """The kernel's counters of the thread that opened them: time on a core, time waiting, turns."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._fd = -1
        with suppress(OSError):  # not Linux, or a kernel that does not count
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read_s(self) -> float:
        if self._fd < 0:
            return 0.0
        # The second number is the waiting time in nanoseconds.
        return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


_FILES = threading.local()


class HostObserver(Observer):
    """An observer of ``tasks``. Each has its own list, to which one thread at a time writes."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.runs: dict[str, list[HostRun]] = {name: [] for name in tasks}
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        self._local.begin = thread_times()

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        now = thread_times()
        runs = self.runs.get(ins.task)
        # ``begin`` is missing if observation began while the task ran.
        begin = self._local.__dict__.pop("begin", None)
        if runs is not None and begin is not None:
            runs.append(HostRun(iteration, *map(sub, now, begin)))


class HostTimes:
    """Times of tasks in some of the observed iterations; seconds per iteration."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._kept: dict[str, list[HostRun]] = {name: [] for name in tasks}
        self._visits_s: dict[str, list[float]] = {name: [] for name in self._kept}

    def observer(self) -> HostObserver:
        """Return an observer of the same tasks."""
        return HostObserver(self._kept)

    def add(self, seen: HostObserver, iterations: Container[int]) -> None:
        """Add the runs of these iterations, which are successive."""
        for name in self._kept:
            runs = [run for run in seen.runs[name] if run.iteration in iterations]
            self._kept[name] += runs
            self._visits_s[name].append(fmean(run.wall_s for run in runs))

    def put_first(self, name: str, runs: Sequence[HostRun]) -> None:
        """Add calls of the loader, which no observer sees, as the first task."""
        self._kept = {name: [*runs], **self._kept}

    @property
    def host_s(self) -> dict[str, float]:
        """Task to the mean time for which it occupies its thread; slow runs count in full."""
        return {name: fmean(run.wall_s for run in runs) for name, runs in self._kept.items()}

    @property
    def error_s(self) -> dict[str, float]:
        """Task to the standard error of ``host_s``, limited to the mean time itself."""
        found = {name: _error_s(self._visits_s.get(name, ())) for name in self._kept}
        return {name: min(found[name], mean_s) for name, mean_s in self.host_s.items()}

    @property
    def cpu_s(self) -> dict[str, float]:
        """Task to the mean time for which its thread is on the CPU."""
        return {name: fmean(run.cpu_s for run in runs) for name, runs in self._kept.items()}

    @property
    def blocked_s(self) -> dict[str, float]:
        """Task to the part of ``host_s`` in which its thread waits, other than for a core."""
        # Means over all runs are subtracted, not single runs: some systems count CPU time in steps
        # of milliseconds.
        cpu_s = self.cpu_s
        core_s = self.core_s
        return {
            name: max(0.0, wall_s - cpu_s[name] - core_s[name])
            for name, wall_s in self.host_s.items()
        }

    @property
    def core_s(self) -> dict[str, float]:
        """Task to the mean time in which its thread could run, but other threads had the cores."""
        return {name: fmean(run.core_s for run in runs) for name, runs in self._kept.items()}

    @property
    def each_s(self) -> dict[str, tuple[float, ...]]:
        """Task to its time in each iteration, in order."""
        in_order = {
            n: sorted(runs, key=lambda run: run.iteration) for n, runs in self._kept.items()
        }
        return {name: tuple(run.wall_s for run in runs) for name, runs in in_order.items()}


def _error_s(visits_s: Sequence[float]) -> float:
    # The error is that of the visits' means: runs of one visit are correlated, so that counting
    # each run would make the error too small.
    return stdev(visits_s) / math.sqrt(len(visits_s)) if len(visits_s) > 1 else math.inf
