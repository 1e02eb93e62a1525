"""What changed between two profiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from swpipe.core.tables import table
from swpipe.profiler.spread import Estimate, ms


@dataclass(frozen=True, slots=True)
class TimeChange:
    """How much a time changed: all in seconds per iteration; None for what was not measured.

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
        """The change between two estimates that do not depend on each other."""
        values = (before and before.value_s, after and after.value_s)
        if before is None or after is None:
            return cls(name, *values, None, None)
        spread_s = math.hypot(before.spread_s, after.spread_s)
        return cls(name, *values, before.value_s - after.value_s, spread_s)

    @property
    def verdict(self) -> str:
        """Whether it is "longer" or "shorter" by more than the interval, or the "same"."""
        if self.saved_s is None or self.spread_s is None:
            return ""
        if abs(self.saved_s) <= self.spread_s:
            return "same"
        return "longer" if self.saved_s < 0 else "shorter"


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """What changed from one profile to another: the iteration, and each task's exposed time.

    Attributes:
        of: What was compared, in words.
    """

    iteration: TimeChange
    tasks: tuple[TimeChange, ...]
    of: str = ""

    @property
    def summary(self) -> str:
        """Whether iterations take longer, by how much, and how sure that is."""
        change = self.iteration
        about = f"{self.of}: " if self.of else ""
        if not (change.before_s and change.saved_s is not None and change.spread_s is not None):
            return f"{about}nothing to compare"
        share, wide = (100 * abs(s) / change.before_s for s in (change.saved_s, change.spread_s))
        if change.verdict == "same":
            return f"{about}no difference of iterations beyond ± {wide:.1f}%"
        return f"{about}iterations are {share:.1f}% ± {wide:.1f}% {change.verdict}"

    def format(self) -> str:
        """A summary, and a table with a row for the iteration and one per task."""
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
