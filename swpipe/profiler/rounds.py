"""Rounds of windows: every kind of window once per round, in another order each time.

    round 1    read      baseline  host   decode
    round 2    decode    host   baseline  read          the one before, backwards
    round 3    baseline  read  decode     host
    ...

A machine that gets slower or faster as time goes on favours no task: what one round does to a
pair of windows, the next undoes. The order is the same in every run, and so on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.profiler.estimate import Column
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import Bench

BASELINE = "<baseline>"
"""The window in which nothing is shortcut."""

HOST = "<host>"
"""A window like the baseline's, in which each task is timed on its thread."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much to measure.

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
        """How many windows there are in all, for so many tasks."""
        return self.num_rounds * (tasks + 2)


class Measured(NamedTuple):
    """What was measured on one batch.

    Attributes:
        columns: ``BASELINE``, and each task, to their windows.
        times: What the tasks did on their threads.
    """

    columns: dict[str, Column]
    times: HostTimes


def measure(
    bench: Bench, names: Sequence[str], num_rounds: int, tick: Callable[[], object]
) -> Measured:
    """Measure all windows, and call ``tick`` after each.

    Raises:
        BaseException: Whatever a task raised, with a note of what was being measured.
    """
    windows: dict[str, list[list[float]]] = {name: [] for name in (BASELINE, *names)}
    times = HostTimes(names)
    bench.window()  # for nothing: what the first iterations make and load is there from now on
    for order in orders((BASELINE, HOST, *names), num_rounds):
        for kind in order:
            try:
                if kind == HOST:
                    bench.host_window(times)
                elif kind == BASELINE:
                    windows[kind].append(bench.window())
                else:
                    with bench.pipe.shortcut(kind):
                        windows[kind].append(bench.window())
            except BaseException as error:
                what = f"with task {kind!r} shortcut" if kind in names else "without a shortcut"
                error.add_note(f"swpipe: while profiling {what}")
                raise
            tick()
    columns = {name: Column(rounds, bench.overlap) for name, rounds in windows.items()}
    return Measured(columns, times)


def orders(kinds: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of the windows in each round: by chance, every other one the last one backwards."""
    chance = random.Random(0)
    order: list[str] = []
    for number in range(num_rounds):
        order = order[::-1] if number % 2 else chance.sample(kinds, len(kinds))
        yield order
