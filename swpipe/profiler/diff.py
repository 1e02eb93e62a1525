"""The changes between two profiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swpipe.core.tables import table
from swpipe.profiler.spread import Estimate, ms


@dataclass(frozen=True, slots=True)
class TimeChange:
    """The change of a time, in seconds per iteration; None for what was not measured.

    Attributes:
        name: A task, whose exposed time it is, or "iteration".
        before: The time in the earlier profile.
        after: The time in the later profile.
    """

    name: str
    before: Estimate | None
    after: Estimate | None

    @property
    def saved(self) -> Estimate | None:
        """How much shorter the time has become, with the interval of this difference."""
        before = self.before
        after = self.after
        if before is None or after is None:
            return None
        # The half-widths of independent estimates add up in squares.
        spread_s = math.hypot(before.spread_s, after.spread_s)
        return Estimate(before.value_s - after.value_s, spread_s)

    @property
    def verdict(self) -> str:
        """The word "longer" or "shorter" if the change exceeds the interval, or else "same"."""
        saved = self.saved
        # A task that exists in one profile only, or failed in one, has no verdict.
        if saved is None:
            return ""
        if abs(saved.value_s) <= saved.spread_s:
            return "same"
        return "longer" if saved.value_s < 0 else "shorter"


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """The changes from one profile to another: of the iteration, and of each task's exposed time.

    Attributes:
        of: The name of what was compared.
    """

    iteration: TimeChange
    tasks: tuple[TimeChange, ...]
    of: str = ""

    @property
    def summary(self) -> str:
        """One sentence: whether iterations take longer, by how much, and how certain that is."""
        change = self.iteration
        saved = change.saved
        about = f"{self.of}: " if self.of else ""
        # Without a time before, there is no percentage.
        if saved is None or change.before is None or not change.before.value_s:
            return f"{about}nothing to compare"
        before_s = change.before.value_s
        share, wide = (100 * abs(s) / before_s for s in (saved.value_s, saved.spread_s))
        if change.verdict == "same":
            return f"{about}no difference of iterations beyond ± {wide:.1f}%"
        return f"{about}iterations are {share:.1f}% ± {wide:.1f}% {change.verdict}"

    def format(self) -> str:
        """Return a summary, and a table with a row for the iteration and one per task."""
        # A positive value in the column of savings means that the second profile is faster. A time
        # that was not measured leaves its cell empty.
        rows = []
        for change in (self.iteration, *self.tasks):
            times = (
                "" if time is None else ms(time.value_s) for time in (change.before, change.after)
            )
            saved = change.saved
            cells = (
                ("", "") if saved is None else (f"{1e3 * saved.value_s:+.3f}", ms(saved.spread_s))
            )
            rows.append((change.name, *times, *cells, change.verdict))
        titles = ("", "before ms", "after ms", "saved ms", "± ms", "beyond ±")
        return f"{self.summary}\n{table(titles, rows)}"

    def __str__(self) -> str:
        return self.format()
