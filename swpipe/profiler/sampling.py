"""Which batches of a loop are measured, and how its iterations differ.

All that is measured of a loop goes through one sample of its batches, in their order::

    the loop        0 1 2 3 4 5 6 7 8 9 ............................................. 4,999
    the sample      |=== block ===|         |=== block ===|          |=== block ===|
    a visit              |==|  the same section in all visits of a round, another one in the next

A block is long enough to have what comes every tenth time, and a chunk of batches that a loader
reads at once. A loop that has no more batches than the sample is gone through as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean, median, pstdev
from typing import Any

from swpipe.core.messages import counted
from swpipe.profiler.spread import short_ms

MOST = 240
"""The most iterations, and so the most batches, of a sample."""

_BLOCKS = 4
_TURN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio are spread evenly, however many there are."""

_EVEN = 0.02
"""The means of visits at different places may differ so much, as a part of an iteration."""

_SLOW = 0.25
"""An iteration is slow that takes longer than the median by this part of it."""

_LEAST_SLOW = 3


@dataclass(frozen=True, slots=True)
class Sample(Sequence[Any]):
    """Batches of a loop, in their order.

    Attributes:
        taken: At least one.
        given: How many there are, of which these are a sample; 0 if that is not known.
    """

    taken: Sequence[Any]
    given: int

    @classmethod
    def of(cls, batches: Iterable[Any], most: int = MOST) -> Sample:
        """Return a sample of at most so many batches.

        A list is sampled in blocks from its beginning to its end. Of an iterator, which can be gone
        through only once, it is the first batches.

        Raises:
            ValueError: There is no batch.
        """
        if isinstance(batches, Sample) and len(batches) <= most:
            return batches
        if isinstance(batches, Sequence):
            given = batches.given if isinstance(batches, Sample) else len(batches)
            there = len(batches)
            count = _BLOCKS if there > most >= _BLOCKS else 1
            block = min(there, most // count)
            starts = [k * (there - block) // max(1, count - 1) for k in range(count)]
            taken = [batches[start + k] for start in starts for k in range(block)]
        else:
            taken = [*islice(batches, most + 1)]
            given = len(taken) if len(taken) <= most else 0
            taken = taken[:most]
        if not taken:
            raise ValueError("batches is empty: give at least one batch")
        return cls(taken, given)

    def __len__(self) -> int:
        return len(self.taken)

    def __getitem__(self, place: Any) -> Any:
        return self.taken[place]

    def section(self, turn: int, length: int) -> Sequence[Any]:
        """Return so many batches in a row, from another place in each turn."""
        count = len(self)
        start = int(count * (turn * _TURN % 1)) if length < count else 0
        return [self.taken[(start + k) % count] for k in range(min(length, count))]

    def dividing(self, length: int) -> int:
        """Return the most batches that a whole number of cycles over them fills ``length`` with."""
        return next(count for count in range(min(len(self), length), 0, -1) if not length % count)

    def iterations(self, most: int, pass_length: int = 0) -> int:
        """Return how many iterations go through it: whole passes, if one is not too long.

        ``pass_length`` is that of a loader, which sets what a pass is.
        """
        length = pass_length if 0 < pass_length <= most else len(self)
        return length * (most // length) if length <= most else most

    def seen(self, iterations: int) -> str:
        """Return what was seen of the loop, in a sentence."""
        there = len(self)
        if there == 1:
            return (
                f"One batch was given, and seen in {counted(iterations, 'iteration')}: how batches "
                "differ is not known. Give the batches of a pass."
            )
        if not self.given:
            return (
                f"The first {there} batches of an iterator were seen, in {iterations} iterations; "
                "of what comes later nothing is known. Give a list to have all of it sampled."
            )
        if min(there, iterations) < self.given:
            seen = min(there, iterations)
            return f"{seen} of {self.given} batches were seen, in {iterations} iterations."
        return f"All {there} batches were seen, in {iterations} iterations."


def visit_length(steps_s: Sequence[float], tasks_s: Iterable[Sequence[float]], most: int) -> int:
    """Return how long a visit has to be, to say the same of the loop wherever it is.

    The least number of iterations in a row whose mean does not depend on the place, but for
    ``_EVEN`` of a step; and no mean of a task's time does. It is 1 where all iterations are alike,
    and ``most`` if there is none.
    """
    step_s = fmean(steps_s)
    series = [each_s for each_s in (steps_s, *tasks_s) if len(each_s) == len(steps_s)]
    for length in range(1, min(most, len(steps_s) // 2) + 1):
        spreads_s = (pstdev(_sums_of(each_s, length)) / length for each_s in series)
        if max(spreads_s) <= _EVEN * step_s:
            return length
    return max(1, most)


def _sums_of(steps_s: Sequence[float], length: int) -> Iterator[float]:
    total = sum(steps_s[:length])
    yield total
    for first, last in zip(steps_s, steps_s[length:], strict=False):
        total += last - first
        yield total


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which so large a part of the values is."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def pattern_of(steps_s: Sequence[float]) -> str:
    """Return how iterations differ, in a sentence; "" where they do not."""
    if len(steps_s) < 2:
        return ""
    usual_s = median(steps_s)
    late_s = quantile(steps_s, 0.95)
    slow = [k for k, step_s in enumerate(steps_s) if step_s > (1 + _SLOW) * usual_s]
    apart = {late - early for early, late in pairwise(slow)}
    words = f"median {short_ms(usual_s)} ms, 95th percentile {short_ms(late_s)} ms"
    if len(slow) >= _LEAST_SLOW and len(apart) == 1:
        more_s = fmean(steps_s[k] for k in slow) - usual_s
        return f"{words}; every {_ordinal(apart.pop())} takes {short_ms(more_s)} ms more"
    return words if late_s > (1 + _SLOW) * usual_s or slow else ""


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
