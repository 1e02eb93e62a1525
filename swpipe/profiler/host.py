"""How long each task occupies its thread, and for how much of that the thread is off the CPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from swpipe._engine.observers import Observer
from swpipe._engine.program import Instruction

_SIGMAS = 4.0
_LEAST_S = 20e-6
"""Differences of host times from here on, in standard errors and in seconds, are told."""


class _Run(NamedTuple):
    iteration: int
    wall_s: float
    cpu_s: float


class HostTimes(Observer):
    """Observes ``tasks``. Each has a list of its own, which one thread at a time writes to."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._new: dict[str, list[_Run]] = {name: [] for name in tasks}
        self._kept: dict[str, list[_Run]] = {name: [] for name in self._new}
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        self._local.begin = (time.perf_counter(), time.thread_time())

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        runs = self._new.get(ins.task)
        begin = self._local.__dict__.pop("begin", None)
        if runs is not None and begin is not None:
            runs.append(_Run(iteration, wall_s - begin[0], cpu_s - begin[1]))

    def keep(self, iterations: range) -> None:
        """Keep the runs of these iterations since the last call, and drop the others."""
        for name, runs in self._new.items():
            self._kept[name] += [run for run in runs if run.iteration in iterations]
            runs.clear()

    def _per_task(self, statistic: Callable[[list[_Run]], float]) -> dict[str, float]:
        return {name: statistic(runs) for name, runs in self._kept.items()}

    @property
    def host_s(self) -> dict[str, float]:
        """Task to the mean seconds per iteration for which it occupies its thread.

        The mean, so that slow runs count in full.
        """
        return self._per_task(lambda runs: fmean(run.wall_s for run in runs))

    @property
    def cpu_s(self) -> dict[str, float]:
        """Task to the mean seconds per iteration for which its thread is on the CPU."""
        return self._per_task(lambda runs: fmean(run.cpu_s for run in runs))

    @property
    def blocked_s(self) -> dict[str, float]:
        """Task to the part of ``host_s`` in which its thread is off the CPU."""
        # From all runs together: some systems count CPU time in steps of milliseconds.
        cpu_s = self.cpu_s
        return {name: max(0.0, wall_s - cpu_s[name]) for name, wall_s in self.host_s.items()}

    def shorter_in(self, other: HostTimes) -> dict[str, float]:
        """Task to the seconds by which its runs in ``other`` are shorter, if that is no noise."""
        found = {}
        for name, runs in self._kept.items():
            here, there = ([run.wall_s for run in each] for each in (runs, other._kept[name]))
            less_s = fmean(here) - fmean(there)
            noise_s = math.hypot(_error_s(here), _error_s(there))
            if less_s > max(_SIGMAS * noise_s, _LEAST_S):
                found[name] = less_s
        return found


def _error_s(runs: Sequence[float]) -> float:
    return stdev(runs) / math.sqrt(len(runs)) if len(runs) > 1 else math.inf
