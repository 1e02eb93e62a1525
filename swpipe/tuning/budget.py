"""How long tuning takes: a bar with an estimate, and a limit.

    record            a batch is measured      planned             a round of the trial
    |== iterations ==|== iterations ==| ... |== no iterations ==|== iterations ==| ...

Time is counted in iterations: how many each part runs is known, and the parts until now show how
long one takes. A limit is kept by fewer iterations in each part, and by fewer parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from swpipe.core.messages import in_ms
from swpipe.core.progress import progress_bar

_MOST = 48
"""Iterations of a window: enough for what comes every tenth or sixteenth time."""


class Window(NamedTuple):
    """Iterations in a row: those that are not timed, then those that are."""

    num_warmup: int = 3
    num_measure: int = 10

    @property
    def iterations(self) -> int:
        """All of them."""
        return self.num_warmup + self.num_measure

    def through(self, batches: int) -> Window:
        """Return one that goes through so many batches, or through as many as are not too long."""
        return self._replace(num_measure=max(self.num_measure, min(batches, _MOST)))


class Budget:
    """What tuning may take, and has taken.

    Args:
        seconds: What it may take; None for as long as it takes.
        verbose: Show a bar on standard error.
        agree: What ranks have in common of this rank's value: their clocks differ, and each of
            them has to run as many iterations. Called only where there is a limit.

    Attributes:
        bar: A context manager, which shows what is left.

    Raises:
        ValueError: ``seconds`` is not above 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        *,
        verbose: bool = False,
        agree: Callable[[float], float] = lambda value: value,
    ) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds is {seconds!r}: give a number greater than 0")
        self.seconds = seconds
        self._agree = agree
        self._begin_s = time.monotonic()
        self._ran = 0
        self._ran_s = 0.0
        self.bar = progress_bar("tuning", " iterations", shown=verbose, leave=False)

    @property
    def took_s(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._begin_s

    @property
    def iteration_s(self) -> float:
        """Seconds that an iteration took until now, in the mean."""
        return self._ran_s / self._ran if self._ran else 0.0

    def expect(self, iterations: int) -> None:
        """So many iterations are yet to come: what the bar's estimate is made of."""
        self.bar.total = self._ran + iterations
        self.bar.refresh()

    def show(self, progress: Callable[[str], object], line: str) -> None:
        """Tell of the next step, on the bar, too."""
        self.bar.set_description(line)
        progress(line)

    @contextmanager
    def spending(self, iterations: int) -> Iterator[None]:
        """Within the block so many iterations run."""
        begin_s = time.monotonic()
        yield
        self._ran_s += time.monotonic() - begin_s
        self._ran += iterations
        self.bar.update(iterations)

    def window(self, windows: int, until: float, usual: Window | None = None) -> Window:
        """How long each of some windows may be, for all of them to be over in time.

        Args:
            windows: How many there will be.
            until: By what part of the limit they shall be over, from 0 to 1.
            usual: How long each is without a limit; None for ``Window()``.
        """
        usual = usual or Window()
        if self.seconds is None:
            return usual
        left_s = max(0.0, until * self.seconds - self.took_s)
        took_s = windows * self.iteration_s
        each = int(self._agree(left_s / took_s if took_s else usual.iterations))
        return usual if each >= usual.iterations else Window(1, max(1, each - 1))

    def allows(self, iterations: int, until: float = 1.0) -> bool:
        """Whether so many more iterations would be over in time."""
        if self.seconds is None:
            return True
        then_s = self.took_s + iterations * self.iteration_s
        return self._agree(then_s) <= until * self.seconds

    def outcome(self) -> tuple[str, ...]:
        """That it took longer than it should have, and why; nothing if it did not."""
        if self.seconds is None or self.took_s <= 1.1 * self.seconds:
            return ()
        given = f"more than the {self.seconds:g} s that it was given"
        each = in_ms(1e6 * self.iteration_s)
        return (f"Tuning took {self.took_s:.0f} s, {given}: an iteration takes {each}.",)
