"""Which iterations of a pipeline are watched."""

from __future__ import annotations

_FIRST = 16
"""So many iterations are watched in any case: what comes every fourth or tenth time shows there."""

_SCATTER = 2_654_435_761
"""A prime, by which windows do not keep step with what comes every so many iterations."""


class Watched:
    """Which iterations are watched; the same on all ranks.

    Args:
        depth: How many iterations may be in flight.
        share: Of those after the first ones, how many: 0 to 1. None: not even the first ones.
    """

    def __init__(self, depth: int, share: float | None) -> None:
        self.none = share is None
        self._window = depth + 1
        self._every = round(self._window / share) if share else 0  # with one window among them

    def __contains__(self, iteration: int) -> bool:
        if iteration < _FIRST or not self._every:
            return iteration < _FIRST and not self.none
        turn, place = divmod(iteration, self._every)
        begin = turn * _SCATTER % (self._every - self._window + 1)
        return begin <= place < begin + self._window

    def any_from(self, iteration: int) -> bool:
        """Whether this iteration or a later one is watched."""
        return not self.none and (bool(self._every) or iteration < _FIRST)
