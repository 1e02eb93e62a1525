"""How long each task holds its thread, and for how much of that the thread is off the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from statistics import fmean, median
from typing import NamedTuple

from swpipe._engine.observers import Observer
from swpipe._engine.program import Instruction


class _Turn(NamedTuple):
    iteration: int
    wall_s: float
    cpu_s: float


class HostTimes(Observer):
    """An observer of tasks. Each task has a list of its own, which one thread at a time writes to.

    Args:
        tasks: The tasks to time; others pass unnoticed.
    """

    def __init__(self, tasks: Iterable[str]) -> None:
        self._turns: dict[str, list[_Turn]] = {name: [] for name in tasks}
        self._kept: dict[str, list[_Turn]] = {name: [] for name in self._turns}
        self._local = threading.local()

    def start(self, ins: Instruction, iteration: int) -> None:
        self._local.begin = (time.perf_counter(), time.thread_time())

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        turns = self._turns.get(ins.task)
        begin = self._local.__dict__.pop("begin", None)
        if turns is not None and begin is not None:
            turns.append(_Turn(iteration, wall_s - begin[0], cpu_s - begin[1]))

    def keep(self, iterations: range) -> None:
        """Keep what was timed since the last call on these iterations, and forget the rest."""
        for name, turns in self._turns.items():
            self._kept[name] += [turn for turn in turns if turn.iteration in iterations]
            turns.clear()

    @property
    def host_s(self) -> dict[str, float]:
        """Task to the seconds per iteration for which it holds its thread."""
        return {name: median(turn.wall_s for turn in turns) for name, turns in self._kept.items()}

    @property
    def mean_s(self) -> dict[str, float]:
        """Like ``host_s``, with slow turns counted in full: what an interval is made of."""
        return {name: fmean(turn.wall_s for turn in turns) for name, turns in self._kept.items()}

    @property
    def cpu_s(self) -> dict[str, float]:
        """Like ``mean_s``, of the time for which the thread is on the CPU."""
        return {name: fmean(turn.cpu_s for turn in turns) for name, turns in self._kept.items()}

    @property
    def blocked_s(self) -> dict[str, float]:
        """Task to the part of ``host_s`` in which its thread was off the CPU."""
        # By the share of all turns: some systems tell a thread's CPU time in steps of milliseconds.
        found = {}
        for (name, host_s), turns in zip(self.host_s.items(), self._kept.values(), strict=True):
            wall_s, cpu_s = sum(t.wall_s for t in turns), sum(t.cpu_s for t in turns)
            found[name] = host_s * max(0.0, 1 - cpu_s / wall_s) if wall_s else 0.0
        return found
