"""The changes between two profiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from swpipe.core.tables import table
from swpipe.profiler.spread import Estimate, ms


@dataclass(frozen=True, slots=True)
class TimeChange:
    """The change of a time, in seconds per iteration; None for what was not measured.

    Attributes:
        name: A task, whose exposed time it is, or "iteration".
        saved_s: ``before_s`` - ``after_s``.
        spread_s: Half-width of the 95% interval of ``saved_s``.
    """

    name: str
    before_s: float | None
    after_s: float | None
    saved_s: float | None
    spread_s: float | None

    @classmethod
    def of(cls, name: str, before: Estimate | None, after: Estimate | None) -> Self:
        """Return the change between two independent estimates."""
        values = (before and before.value_s, after and after.value_s)
        if before is None or after is None:
            return cls(name, *values, None, None)
        # The half-widths of independent estimates add up in squares.
        spread_s = math.hypot(before.spread_s, after.spread_s)
        return cls(name, *values, before.value_s - after.value_s, spread_s)

    @property
    def verdict(self) -> str:
        """The word "longer" or "shorter" if the change exceeds the interval, or else "same"."""
        # A task that exists in one profile only, or failed in one, has no verdict.
        if self.saved_s is None or self.spread_s is None:
            return ""
        if abs(self.saved_s) <= self.spread_s:
            return "same"
        return "longer" if self.saved_s < 0 else "shorter"


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """The changes from one profile to another: of the iteration, and of each task's exposed time.

    Attributes:
        of: What was compared, in words.
    """

    iteration: TimeChange
    tasks: tuple[TimeChange, ...]
    of: str = ""

    @property
    def summary(self) -> str:
        """One sentence: whether iterations take longer, by how much, and how certain that is."""
        change = self.iteration
        about = f"{self.of}: " if self.of else ""
        # Without a time before, there is no percentage.
        if not (change.before_s and change.saved_s is not None and change.spread_s is not None):
            return f"{about}nothing to compare"
        share, wide = (100 * abs(s) / change.before_s for s in (change.saved_s, change.spread_s))
        if change.verdict == "same":
            return f"{about}no difference of iterations beyond ± {wide:.1f}%"
        return f"{about}iterations are {share:.1f}% ± {wide:.1f}% {change.verdict}"

    def format(self) -> str:
        """Return a summary, and a table with a row for the iteration and one per task."""
        # A positive value in the column of savings means that the second profile is faster. A time
        # that was not measured leaves its cell empty.
        rows = [
            (
                change.name,
                *("" if s is None else ms(s) for s in (change.before_s, change.after_s)),
                "" if change.saved_s is None else f"{1e3 * change.saved_s:+.3f}",
                "" if change.spread_s is None else ms(change.spread_s),
                change.verdict,
            )
            for change in (self.iteration, *self.tasks)
        ]
        titles = ("", "before ms", "after ms", "saved ms", "± ms", "beyond ±")
        return f"{self.summary}\n{table(titles, rows)}"

    def __str__(self) -> str:
        return self.format()
