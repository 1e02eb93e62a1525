"""Measure in rounds: each window once per round, in an order that changes.

    round 1    read      baseline  host   decode
    round 2    decode    host   baseline  read          round 1 in reverse
    round 3    baseline  read  decode     host
    ...

Each window starts from the same state: a shortcut replays the same outputs in each iteration, which
can lead training astray. If the machine gets slower or faster over time, this affects all tasks
alike: a reversed round cancels the drift of the one before. The order is the same in every run, and
so on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe._distributed.rank_checks import is_alone
from swpipe.core.errors import add_note
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.spread import Column

BASELINE = "<baseline>"
"""The window in which no task is shortcut."""

HOST = "<host>"
"""A baseline window in which each task is also timed on its thread."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of iterations and rounds.

    Raises:
        ValueError: A number is too small.
    """

    num_warmup: int
    num_measure: int
    num_rounds: int

    def __post_init__(self) -> None:
        for name, least in (("num_warmup", 0), ("num_measure", 1), ("num_rounds", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number, {least} or more")
        if self.num_measure * self.num_rounds < 2:
            raise ValueError(
                "num_measure and num_rounds are both 1: one measurement has no error bar; "
                "give one of them 2 or more"
            )

    def windows(self, tasks: int) -> int:
        """The number of windows in all rounds, for this number of tasks."""
        return self.num_rounds * (tasks + 2)


class Measured(NamedTuple):
    """The windows of ``BASELINE`` and of each task, and the tasks' times on their threads.

    Attributes:
        failed: Why tasks could not be measured; these have no column.
        interrupted: Not all rounds were measured: Ctrl-C came first.
    """

    columns: dict[str, Column]
    times: HostTimes
    failed: dict[str, Exception]
    interrupted: bool


def measure(
    timer: WindowTimer,
    names: Sequence[str],
    num_rounds: int,
    tick: Callable[[], object],
    restore: Callable[[], object],
) -> Measured:
    """Measure all windows; call ``restore`` and ``tick`` after each.

    A task with which iterations fail while it is shortcut, and only then, is left out from there
    on. On several ranks it fails the profile: the others may wait in a collective.

    Raises:
        BaseException: Whatever a task raised, with a note of what was being measured.
            KeyboardInterrupt only until each window was measured once.
    """
    rounds = _Rounds(timer, names, restore)
    rounds.run(BASELINE)  # not used: the first iterations allocate and compile
    rounds.windows[BASELINE].clear()
    interrupted = False
    for number, order in enumerate(window_orders((BASELINE, HOST, *names), num_rounds)):
        try:
            for kind in order:
                rounds.run(kind)
                tick()
        except KeyboardInterrupt:
            if number == 0:
                raise
            rounds.keep(number)
            interrupted = True
            break
    columns = {
        name: Column(windows, timer.overlap)
        for name, windows in rounds.windows.items()
        if name not in rounds.failed
    }
    return Measured(columns, rounds.times, rounds.failed, interrupted)


class _Rounds:
    """The windows that were measured so far."""

    def __init__(
        self, timer: WindowTimer, names: Sequence[str], restore: Callable[[], object]
    ) -> None:
        self._timer = timer
        self._restore = restore
        self.windows: dict[str, list[list[float]]] = {name: [] for name in (BASELINE, *names)}
        self.times = HostTimes(names)
        self.failed: dict[str, Exception] = {}

    def keep(self, number: int) -> None:
        """Keep the windows of the first rounds, so that all kinds have the same number."""
        self.windows = {name: windows[:number] for name, windows in self.windows.items()}

    def run(self, kind: str) -> None:
        """Measure one window, unless its task has failed before."""
        if kind in self.failed:
            return
        if kind in (BASELINE, HOST):
            self._without_shortcut(kind)
            return
        try:
            with self._timer.pipe.shortcut(kind):
                self.windows[kind].append(self._timer.window())
        except BaseException as error:
            add_note(error, f"swpipe: while profiling with task {kind!r} shortcut")
            if not isinstance(error, Exception) or not is_alone():
                raise
            self._restore()
            self._without_shortcut(HOST)  # it raises if the shortcut was not the reason
            self.failed[kind] = error
        finally:
            self._restore()

    def _without_shortcut(self, kind: str) -> None:
        try:
            if kind == HOST:
                self._timer.host_window(self.times)
            else:
                self.windows[kind].append(self._timer.window())
        except BaseException as error:
            add_note(error, "swpipe: while profiling without a shortcut")
            raise
        finally:
            self._restore()


def window_orders(kinds: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of the windows in each round: random, then its reverse, then random again."""
    rng = random.Random(0)
    order: list[str] = []
    for number in range(num_rounds):
        order = order[::-1] if number % 2 else rng.sample(kinds, len(kinds))
        yield order
