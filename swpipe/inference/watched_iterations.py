"""The choice of the iterations of a pipeline that are watched."""

from __future__ import annotations

import sys

_FIRST = 16
"""The number of iterations that are always watched; events of every 4th or 10th one show."""

_SCATTER = 2_654_435_761
"""A prime that keeps the watched windows out of step with periodic events."""


class WatchedIterations:
    """The set of iterations that are watched; the same on all ranks.

    Args:
        depth: How many iterations may be in flight.
        share: The share of the iterations after the first ones, from 0 to 1. None: no iteration is
            watched, not even the first ones.

    Attributes:
        until: The first iteration from which on none is watched any more.
    """

    def __init__(self, depth: int, share: float | None) -> None:
        self.until = sys.maxsize if share else 0 if share is None else _FIRST
        self._window = depth + 1
        self._every = round(self._window / share) if share else 0  # one window in each such block

    def __contains__(self, iteration: int) -> bool:
        if iteration < _FIRST or not self._every:
            return iteration < self.until
        # One window of depth + 1 iterations in each block of _every: all pairs in flight are seen.
        # The window's place within the block depends on the block's number only, so ranks agree.
        turn, place = divmod(iteration, self._every)
        begin = turn * _SCATTER % (self._every - self._window + 1)
        return begin <= place < begin + self._window
