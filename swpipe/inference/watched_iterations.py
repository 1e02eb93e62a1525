"""Which iterations of a pipeline are watched."""

from __future__ import annotations

import sys

_FIRST = 16
"""So many iterations are watched in any case: what comes every fourth or tenth time shows there."""

_SCATTER = 2_654_435_761
"""A prime, by which windows do not keep step with what comes every so many iterations."""


class WatchedIterations:
    """Which iterations are watched; the same on all ranks.

    Args:
        depth: How many iterations may be in flight.
        share: Of those after the first ones, how many: 0 to 1. None: not even the first ones.

    Attributes:
        until: The first iteration from which none is watched any more.
    """

    def __init__(self, depth: int, share: float | None) -> None:
        self.until = sys.maxsize if share else 0 if share is None else _FIRST
        self._window = depth + 1
        self._every = round(self._window / share) if share else 0  # with one window among them

    def __contains__(self, iteration: int) -> bool:
        if iteration < _FIRST or not self._every:
            return iteration < self.until
        turn, place = divmod(iteration, self._every)
        begin = turn * _SCATTER % (self._every - self._window + 1)
        return begin <= place < begin + self._window
