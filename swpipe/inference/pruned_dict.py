"""A dict for what may be gone by now, such as memory that has been freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_SPARE = 4096
"""The number of entries that are added at least between two prunings."""


class PrunedDict(dict[K, V]):
    """A dict that is pruned now and then."""

    _most = 0

    def prune(self, gone: Callable[[V], bool]) -> None:
        """Drop the entries whose values are gone, if many entries were added since the last time.

        At least as many are added between two prunings as the first of them left: the cost of all
        prunings is constant for each entry.
        """
        if len(self) <= self._most:
            return
        for key in [key for key, value in self.items() if gone(value)]:
            del self[key]
        self._most = 2 * len(self) + _SPARE
