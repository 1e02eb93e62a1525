"""Measure in rounds: each window once per round, in an order that changes.

    round 1    read      baseline  host   decode
    round 2    decode    host   baseline  read          round 1 in reverse
    round 3    baseline  read  decode     host
    ...

If the machine gets slower or faster over time, this affects all tasks alike: a reversed round
cancels the drift of the one before. The order is the same in every run, and so on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """The windows of ``BASELINE`` and of each task, and the tasks' times on their threads."""

    columns: dict[str, Column]
    times: HostTimes


def measure(
    timer: WindowTimer, names: Sequence[str], num_rounds: int, tick: Callable[[], object]
) -> Measured:
    """Measure all windows, and call ``tick`` after each.

    Raises:
        BaseException: Whatever a task raised, with a note of what was being measured.
    """
    windows: dict[str, list[list[float]]] = {name: [] for name in (BASELINE, *names)}
    times = HostTimes(names)
    timer.window()  # not used: the first iterations allocate and compile
    for order in window_orders((BASELINE, HOST, *names), num_rounds):
        for kind in order:
            try:
                if kind == HOST:
                    timer.host_window(times)
                elif kind == BASELINE:
                    windows[kind].append(timer.window())
                else:
                    with timer.pipe.shortcut(kind):
                        windows[kind].append(timer.window())
            except BaseException as error:
                what = f"with task {kind!r} shortcut" if kind in names else "without a shortcut"
                add_note(error, f"swpipe: while profiling {what}")
                raise
            tick()
    columns = {name: Column(rounds, timer.overlap) for name, rounds in windows.items()}
    return Measured(columns, times)


def window_orders(kinds: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of the windows in each round: random, then its reverse, then random again."""
    rng = random.Random(0)
    order: list[str] = []
    for number in range(num_rounds):
        order = order[::-1] if number % 2 else rng.sample(kinds, len(kinds))
        yield order
