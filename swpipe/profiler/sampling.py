"""The sample of batches that a profile of a loop runs on, and how the loop's iterations differ.

All measurements of a loop go through one sample of its batches, in their order::

    the loop        0 1 2 3 4 5 6 7 8 9 ............................................. 4,999
    the sample      |=== block ===|         |=== block ===|          |=== block ===|
    a visit              |==|  the same section in all visits of a round, another one in the next

A block is long enough to include events in every tenth iteration, and a chunk of batches that a
loader reads at once. If a loop has no more batches than the sample, all of them are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from statistics import fmean, median, pstdev
from typing import Any

from swpipe.core.messages import counted
from swpipe.profiler.spread import short_ms

MOST = 240
"""The maximum number of iterations of a passage, and so of batches in a sample."""

_BLOCKS = 4
_TURN = (math.sqrt(5) - 1) / 2
"""The step from section to section: multiples of the golden ratio are evenly spread modulo 1."""

_EVEN = 0.02
"""The means of visits at different places may differ by this fraction of an iteration."""

_SLOW = 0.25
"""An iteration is slow if it takes longer than the median by this fraction of it."""

_LEAST_SLOW = 3


@dataclass(frozen=True, slots=True)
class Sample(Sequence[Any]):
    """Batches of a loop, in their order.

    Attributes:
        taken: The batches, at least one.
        given: The number of batches from which these were sampled; 0 if unknown.
    """

    taken: Sequence[Any]
    given: int

    @classmethod
    def of(cls, batches: Iterable[Any], most: int = MOST) -> Sample:
        """Return a sample of at most ``most`` batches.

        A list is sampled in blocks from its beginning to its end. An iterator can be gone through
        only once, so its first batches are the sample.

        Raises:
            ValueError: There is no batch.
        """
        if isinstance(batches, Sample) and len(batches) <= most:
            return batches
        if isinstance(batches, Sequence):
            given = batches.given if isinstance(batches, Sample) else len(batches)
            there = len(batches)
            # The first block starts at the first batch, the last block ends at the last batch, and
            # the starts of the blocks are evenly spaced.
            count = _BLOCKS if there > most >= _BLOCKS else 1
            block = min(there, most // count)
            starts = [k * (there - block) // max(1, count - 1) for k in range(count)]
            taken = [batches[start + k] for start in starts for k in range(block)]
        else:
            # One batch more than needed shows whether the iterator has an end within the sample.
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
        """Return ``length`` successive batches, from another place in each turn."""
        count = len(self)
        # The fractional part of turn * golden ratio visits all places evenly, and wraps around at
        # the end.
        start = int(count * (turn * _TURN % 1)) if length < count else 0
        return [self.taken[(start + k) % count] for k in range(min(length, count))]

    def dividing(self, length: int) -> int:
        """Return the largest number of batches of which whole cycles fill ``length`` iterations."""
        return next(count for count in range(min(len(self), length), 0, -1) if not length % count)

    def iterations(self, most: int, pass_length: int = 0) -> int:
        """Return how many iterations to run: whole passes, if one pass is at most ``most`` long.

        ``pass_length`` is the length of the loader's pass, if that determines what a pass is.
        """
        length = pass_length if 0 < pass_length <= most else len(self)
        return length * (most // length) if length <= most else most

    def coverage(self, iterations: int) -> str:
        """Return a sentence that says how much of the loop was run."""
        there = len(self)
        if there == 1:
            return (
                f"One batch was given, and seen in {counted(iterations, 'iteration')}: it is not "
                "known how batches differ. Give the batches of a pass."
            )
        if not self.given:
            return (
                f"The first {there} batches of an iterator were seen, in {iterations} iterations; "
                "nothing is known of later ones. Give a list to have all of it sampled."
            )
        if min(there, iterations) < self.given:
            seen = min(there, iterations)
            return f"{seen} of {self.given} batches were seen, in {iterations} iterations."
        return f"All {there} batches were seen, in {iterations} iterations."


def visit_length(steps_s: Sequence[float], tasks_s: Iterable[Sequence[float]], most: int) -> int:
    """Return how long a visit must be to represent the loop, wherever in the loop it is.

    This is the smallest number of successive iterations whose mean does not depend on the place by
    more than ``_EVEN`` of a step, nor does the mean of any task's time. It is 1 if all iterations
    are alike, and ``most`` if there is no smaller number.
    """
    step_s = fmean(steps_s)
    # A task that did not run in each iteration has no comparable series.
    series = [each_s for each_s in (steps_s, *tasks_s) if len(each_s) == len(steps_s)]
    for length in range(1, min(most, len(steps_s) // 2) + 1):
        spreads_s = (pstdev(_window_sums(each_s, length)) / length for each_s in series)
        if max(spreads_s) <= _EVEN * step_s:
            return length
    return max(1, most)


def _window_sums(steps_s: Sequence[float], length: int) -> list[float]:
    """Return the sums of all windows of ``length`` successive iterations."""
    totals = [0.0, *accumulate(steps_s)]
    return [end - begin for begin, end in zip(totals, totals[length:], strict=False)]


def pattern_of(steps_s: Sequence[float]) -> str:
    """Return how iterations differ, in words; "" if they do not."""
    if len(steps_s) < 2:
        return ""
    usual_s = median(steps_s)
    late_s = sorted(steps_s)[int(0.95 * len(steps_s))]
    slow = [k for k, step_s in enumerate(steps_s) if step_s > (1 + _SLOW) * usual_s]
    # Only if slow iterations are all equally far apart is there a period to report.
    apart = {late - early for early, late in pairwise(slow)}
    words = f"median {short_ms(usual_s)} ms, 95th percentile {short_ms(late_s)} ms"
    if len(slow) >= _LEAST_SLOW and len(apart) == 1:
        more_s = fmean(steps_s[k] for k in slow) - usual_s
        return f"{words}; one in {apart.pop()} takes {short_ms(more_s)} ms more"
    return words if late_s > (1 + _SLOW) * usual_s or slow else ""
