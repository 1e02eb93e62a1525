"""Measure in rounds: each window once per round, in an order that changes.

    round 1    read      baseline  step      decode
    round 2    decode    step      baseline  read        round 1 in reverse
    round 3    baseline  read      decode    step
    ...

In all windows each task is timed on its thread too. While one is shortcut, its own time is that of
the replay, and that of others shows what it costs them: a forward takes part of the backward along.

Each window starts from the same state: a shortcut replays the same outputs in each iteration, which
can lead training astray. If the machine gets slower or faster over time, this affects all tasks
alike: a reversed round cancels the drift of the one before. The order is the same in every run, and
so on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from swpipe._distributed.rank_checks import is_alone
from swpipe.core.errors import UnsavedStateError, add_note
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.spread import Column

BASELINE = "<baseline>"
"""The window in which no task is shortcut."""


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
        return self.num_rounds * (tasks + 1)


class Measured(NamedTuple):
    """The windows of ``BASELINE`` and of each task, and all tasks' times on their threads in these.

    Attributes:
        failed: Why tasks could not be measured; these have no column.
        interrupted: Not all rounds were measured: Ctrl-C came first.
    """

    columns: dict[str, Column]
    times: dict[str, HostTimes]
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
    _Rounds(timer, names, restore).run(BASELINE)  # the first iterations allocate and compile
    rounds = _Rounds(timer, names, restore)
    interrupted = False
    for number, order in enumerate(window_orders((BASELINE, *names), num_rounds)):
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
        tasks = [task.name for task in timer.pipe.tasks]
        self.times = {name: HostTimes(tasks) for name in self.windows}
        self.failed: dict[str, Exception] = {}

    def keep(self, number: int) -> None:
        """Keep the windows of the first rounds, so that all kinds have the same number."""
        self.windows = {name: windows[:number] for name, windows in self.windows.items()}

    def run(self, kind: str) -> None:
        """Measure one window, unless its task has failed before."""
        if kind in self.failed:
            return
        try:
            self.windows[kind].append(self._window(kind))
        except UnsavedStateError:
            raise
        except Exception as error:
            if kind == BASELINE or not is_alone():
                raise
            self._window(BASELINE)  # it raises if the shortcut was not the reason
            self.failed[kind] = error

    def _window(self, kind: str) -> list[float]:
        pipe, shortcut = self._timer.pipe, kind != BASELINE
        try:
            with pipe.shortcut(kind) if shortcut else nullcontext():
                samples = self._timer.window(self.times[kind])
                pipe.check_shortcuts()
                return samples
        except BaseException as error:
            what = f"with task {kind!r} shortcut" if shortcut else "without a shortcut"
            add_note(error, f"swpipe: while profiling {what}")
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
