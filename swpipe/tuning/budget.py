"""The time that tuning takes, and a limit to it.

    record            a batch is measured      planned             a round of the trial
    |== iterations ==|== iterations ==| ... |== no iterations ==|== iterations ==| ...

Time is counted in iterations: the number of iterations in each part is known, and the parts so far
show how long an iteration takes. To keep a limit, parts get fewer iterations, and there are fewer
parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from swpipe._distributed.rank_checks import gather
from swpipe.core.messages import in_ms

_MOST = 48
"""The maximum number of iterations of a window: enough for events in every tenth or sixteenth
iteration.
"""


class Window(NamedTuple):
    """Successive iterations: those that are not timed, then those that are."""

    num_warmup: int = 3
    num_measure: int = 10

    @property
    def iterations(self) -> int:
        """The number of all iterations, timed or not."""
        return self.num_warmup + self.num_measure

    def through(self, batches: int) -> Window:
        """Return a window through ``batches`` batches, or through as many as ``_MOST`` admits."""
        return self._replace(num_measure=max(self.num_measure, min(batches, _MOST)))


class Budget:
    """The time that tuning may take, and has taken.

    Args:
        seconds: The limit; None for no limit.

    Raises:
        ValueError: ``seconds`` is not above 0.
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds is {seconds!r}: give a number greater than 0")
        self.seconds = seconds
        self._begin_s = time.monotonic()
        self._ran = 0
        self._ran_s = 0.0

    @property
    def took_s(self) -> float:
        """Seconds since tuning began."""
        return time.monotonic() - self._begin_s

    @property
    def iteration_s(self) -> float:
        """Mean seconds of an iteration so far; 0 before the first one."""
        return self._ran_s / self._ran if self._ran else 0.0

    @contextmanager
    def spending(self, iterations: int) -> Iterator[None]:
        """Count ``iterations`` iterations, which run inside the block, and their time."""
        begin_s = time.monotonic()
        # After an exception nothing is counted, since it is unknown how many iterations ran.
        yield
        self._ran_s += time.monotonic() - begin_s
        self._ran += iterations

    def window(self, windows: int, until: float, usual: Window | None = None) -> Window:
        """Return the length of each of ``windows`` windows, so that all of them end in time.

        Args:
            windows: The number of windows.
            until: The fraction of the limit at which they shall have ended, from 0 to 1.
            usual: The length of each without a limit; None for ``Window()``.
        """
        usual = usual or Window()
        if self.seconds is None:
            return usual
        left_s = max(0.0, until * self.seconds - self.took_s)
        took_s = windows * self.iteration_s
        # The clocks of ranks differ, but all run the same number of iterations: that of rank 0.
        # Every rank comes here, since the branches above depend on the limit alone.
        each = int(gather(left_s / took_s if took_s else usual.iterations)[0])
        # A short window has a single warm-up iteration, to measure as many as possible.
        return usual if each >= usual.iterations else Window(1, max(1, each - 1))

    def allows(self, iterations: int, until: float = 1.0) -> bool:
        """Return whether this many more iterations would end within a fraction of the limit."""
        if self.seconds is None:
            return True
        then_s = self.took_s + iterations * self.iteration_s
        return gather(then_s)[0] <= until * self.seconds

    def outcome(self) -> tuple[str, ...]:
        """Return a sentence if tuning took clearly longer than its limit, and why; else nothing."""
        # Some overrun is normal: parts in progress are not cut short.
        if self.seconds is None or self.took_s <= 1.1 * self.seconds:
            return ()
        given = f"more than the {self.seconds:g} s that it was given"
        each = in_ms(1e6 * self.iteration_s)
        return (f"Tuning took {self.took_s:.0f} s, {given}: an iteration takes {each}.",)
