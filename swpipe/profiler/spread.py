"""Exposed times with error bars, from the times of iterations.

The measurements form a table of windows. A window is a few iterations in a row, with one task
shortcut, or none. Its value is the mean of its samples, since throughput is a mean: what is slow
every eighth time costs an eighth of that in each step::

    round     baseline   read   decode   forward        each round in another order
      1         10.1      8.0     6.1      9.9
      2         10.4      8.4     6.3     10.3          the machine drifts: the whole row shifts
      3         10.2      8.1     6.1     10.0

The exposed time of a task is the mean over the rows of baseline minus the task's column. What
shifts a whole row cancels out.

The error bar is the maximum of three, since each can miss what another one shows:

- the noise of one window: the residuals after subtracting row and column means. All columns
  contribute, so three rounds are enough (a randomised block design; Student's factor at 99%);
- the differences of the task itself, row by row, for a task that is noisier than the others;
- the samples within the windows: the only information if there is one round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

STUDENT_99 = (10.0, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17)
"""Two-sided 99% points of Student's distribution for 1, 2, ... degrees of freedom; then ``SIGMAS``.

The first would be 64, a useless bound: the samples within the windows give a better one there.
"""

SIGMAS = 3.0


class Estimate(NamedTuple):
    """A time and the half-width of its error bar, both in seconds."""

    value_s: float
    spread_s: float


@dataclass(frozen=True, slots=True)
class Column:
    """All windows with the same task shortcut.

    Attributes:
        windows: One per round; its samples in seconds per iteration.
        overlap: How many iterations a sample spans: neighbouring samples share all but one.
    """

    windows: Sequence[Sequence[float]]
    overlap: int = 1

    @property
    def means(self) -> list[float]:
        """The mean of each window, in seconds."""
        return [fmean(window) for window in self.windows]

    @property
    def median_s(self) -> float:
        """The median of all samples."""
        return median(sample for window in self.windows for sample in window)

    @property
    def error_s(self) -> float:
        """Standard error of the column's mean, from the samples within its windows alone."""
        deviations = [
            sample - mean
            for window, mean in zip(self.windows, self.means, strict=True)
            for sample in window
        ]
        count, freedom = len(deviations), len(deviations) - len(self.windows)
        if freedom == 0:
            return 0.0
        variance = sum(deviation**2 for deviation in deviations) / freedom
        return math.sqrt(variance * self.overlap / count)


def iteration_time(column: Column) -> Estimate:
    """The time of an iteration, in the mean over the rounds."""
    means = column.means
    spread_s = SIGMAS * column.error_s
    if len(means) > 1:
        spread_s = max(spread_s, SIGMAS * stdev(means) / math.sqrt(len(means)))
    return Estimate(fmean(means), spread_s)


def time_saved(baseline: Column, columns: Mapping[str, Column]) -> dict[str, Estimate]:
    """How much shorter an iteration is in each column than in the baseline; may be negative."""
    rounds = len(baseline.windows)
    table = [baseline.means, *(column.means for column in columns.values())]
    shared_s = _window_noise_s(table) * math.sqrt(2 / rounds)
    found = {}
    for name, column in columns.items():
        by_round = [a - b for a, b in zip(baseline.means, column.means, strict=True)]
        spreads = [shared_s, SIGMAS * math.hypot(baseline.error_s, column.error_s)]
        if rounds > 1:
            spreads.append(SIGMAS * stdev(by_round) / math.sqrt(rounds))
        found[name] = Estimate(fmean(by_round), max(spreads))
    return found


def with_replay(saved: Estimate, host_s: float, replay_s: float, *, alone: bool) -> Estimate:
    """Add what the replay took, so that the estimate is that of an iteration without the task.

    Args:
        saved: How much shorter the iteration is with a replay instead of the task.
        host_s: The task's time on its thread.
        replay_s: That of the replay.
        alone: Nothing overlaps the task, so that the replay counts in full. Otherwise other work
            may hide the replay, though it does not hide the task: the replay counts between
            nothing and as much as the rest of the task's time does. The estimate is the middle of
            that, and the error bar has both ends.
    """
    if alone:
        return Estimate(saved.value_s + replay_s, saved.spread_s)
    share = 1.0
    if host_s > replay_s:
        share = min(1.0, max(0.0, saved.value_s / (host_s - replay_s)))
    half_s = share * replay_s / 2
    return Estimate(saved.value_s + half_s, saved.spread_s + half_s)


def _window_noise_s(table: Sequence[Sequence[float]]) -> float:
    """The noise of one window times Student's factor; ``table`` is columns x rounds."""
    rounds = len(table[0])
    if rounds < 2 or len(table) < 2:
        return 0.0
    column_means = [fmean(column) for column in table]
    round_means = [fmean(column[r] for column in table) for r in range(rounds)]
    mean = fmean(column_means)
    squares = sum(
        (value - column_mean - round_mean + mean) ** 2
        for column, column_mean in zip(table, column_means, strict=True)
        for value, round_mean in zip(column, round_means, strict=True)
    )
    freedom = (len(table) - 1) * (rounds - 1)
    factor = STUDENT_99[freedom - 1] if freedom <= len(STUDENT_99) else SIGMAS
    return factor * math.sqrt(squares / freedom)
