"""Times with 95% intervals, from the visits of ``swpipe.profiler.rounds``.

The time of a visit is the mean of its iterations, since throughput is a mean: an event in every
eighth iteration costs each step an eighth of its time. A visit is compared with the time on the
line between the two visits without a shortcut around it: if the machine slows down within seconds,
all three change alike. This matters more than long visits. The times of neighbouring iterations are
strongly correlated, so that ten successive iterations say little more than three.

Each round contributes one difference per kind, each time at another place in the round. The
differences are many iterations apart and nearly independent. Their mean is the estimate, and
Student's distribution gives its interval. Most of their noise is the machine's, and the same for
all kinds. Therefore the variance is that of the kind's own differences together with the mean
variance of the other kinds, which counts as ``PRIOR`` more differences (G. K. Smyth, "Linear models
and empirical Bayes methods", 2004, where that number is estimated).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import TypeAlias, TypeVar

K = TypeVar("K")

Kind: TypeAlias = str
"""The task that is shortcut in a visit; ``PULL`` if the loader is not called."""

BASE: Kind = ""
"""The kind of a visit in which no task is shortcut."""

PRIOR = 4
"""The number of differences that the variance of the other kinds counts for, at most."""

_PARTS = 6
"""The number of parts that a run over the loop is divided into, if it is long enough."""

_STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45)
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time and the half-width of its 95% interval, both in seconds."""

    value_s: float
    spread_s: float

    @property
    def is_clear(self) -> bool:
        """Whether the time is larger than its uncertainty."""
        return self.value_s > self.spread_s

    @property
    def text(self) -> str:
        """Milliseconds with their interval; "< x" if the time cannot be told apart from 0."""
        if 0 < self.spread_s >= self.value_s:
            return f"< {short_ms(max(0.0, self.value_s) + self.spread_s)}"
        return f"{short_ms(self.value_s)}{within(self.spread_s)}"

    @property
    def exact(self) -> str:
        """Milliseconds with their interval, both with three decimals."""
        return f"{ms(self.value_s)}{within(self.spread_s, ms)}"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, with three decimals."""
    return f"{1e3 * seconds:.3f}"


def short_ms(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits: "1.25", "12.5" or "125"."""
    value = 1e3 * seconds
    # The limits are where rounding would give a fourth digit, as in 9.995 to "10.00".
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def within(spread_s: float, show: Callable[[float], str] = short_ms) -> str:
    """Return the half-width of an interval as text; "" if it is 0 in the digits shown."""
    text = show(spread_s)
    return f" ± {text}" if float(text) else ""


def student_95(freedom: int) -> float:
    """Return the two-sided 95% point of Student's distribution.

    From 7 degrees of freedom on, this is its expansion in powers of 1 / freedom (Abramowitz and
    Stegun, 26.7.5), which is accurate to 0.5%.
    """
    if freedom <= len(_STUDENT_95):
        return _STUDENT_95[freedom - 1]
    z = _NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_of(by_round: Sequence[float]) -> Estimate:
    """Return the mean over two or more rounds, with its interval."""
    half_s = student_95(len(by_round) - 1) * math.sqrt(variance(by_round) / len(by_round))
    return Estimate(fmean(by_round), half_s)


def mean_of_loop(values: Sequence[float], cycle: int) -> Estimate:
    """Return the mean over successive iterations of a loop, whose batches repeat after ``cycle``.

    If all batches were gone through, their differences are no uncertainty. The interval is that of
    the means of whole passes, or of parts of the single pass.
    """
    # Parts of equal content are compared: whole passes where there are several, so that batches
    # that differ do not widen the interval.
    passes = len(values) // cycle
    size = cycle * max(1, passes // _PARTS) if passes > 1 else max(1, len(values) // _PARTS)
    parts = [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]
    return Estimate(fmean(values), mean_of(parts).spread_s if len(parts) > 1 else 0.0)


def differences_in(round_: Sequence[tuple[Kind, Sequence[float]]]) -> dict[Kind, float]:
    """Return for each kind how much shorter its iterations were than those without a shortcut.

    The latter are taken from the line between the two visits without a shortcut around the kind.
    """
    bases = [index for index, (kind, _) in enumerate(round_) if kind == BASE]
    saved_s: dict[Kind, float] = {}
    for before, after in pairwise(bases):
        first_s, last_s = (fmean(round_[place][1]) for place in (before, after))
        for place in range(before + 1, after):
            kind, seconds = round_[place]
            # The linear interpolation cancels a drift of the machine between the two visits.
            share = (place - before) / (after - before)
            saved_s[kind] = first_s * (1 - share) + last_s * share - fmean(seconds)
    return saved_s


def time_saved(differences: Mapping[K, Sequence[float]]) -> dict[K, Estimate]:
    """Return how much shorter an iteration is with each kind of shortcut.

    Args:
        differences: Kind to its differences in seconds, at least two; positive if the iterations
            with the shortcut were shorter.
    """
    # ``squares`` are the sums of squared deviations, which add up over kinds as variances do not.
    squares = {kind: variance(of) * (len(of) - 1) for kind, of in differences.items()}
    freedoms = {kind: len(of) - 1 for kind, of in differences.items()}
    estimates = {}
    for kind, of in differences.items():
        others = sum(freedoms.values()) - freedoms[kind]
        prior = min(PRIOR, others)
        shared = (sum(squares.values()) - squares[kind]) / others if others else 0.0
        # The moderated variance is a mean of the two variances, weighted by their degrees of
        # freedom.
        freedom = freedoms[kind] + prior
        error_s = math.sqrt((squares[kind] + prior * shared) / freedom / len(of))
        estimates[kind] = Estimate(fmean(of), student_95(freedom) * error_s)
    return estimates


def between(estimate: Estimate, more_s: float) -> Estimate:
    """Add an amount that counts between nothing and in full.

    The estimate is the middle, and the interval covers both ends.
    """
    return Estimate(estimate.value_s + more_s / 2, estimate.spread_s + abs(more_s) / 2)
