"""What changed between two profiles, and how a profile's tables look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from swpipe.profiler.spread import Estimate


@dataclass(frozen=True, slots=True)
class Change:
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


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """What changed from one profile to another: the iteration, and each task's exposed time."""

    iteration: Change
    tasks: tuple[Change, ...]

    def format(self) -> str:
        """A table with a row for the iteration and one per task."""
        rows = [
            (
                change.name,
                *("" if s is None else ms(s) for s in (change.before_s, change.after_s)),
                "" if change.saved_s is None else f"{1e3 * change.saved_s:+.3f}",
                "" if change.spread_s is None else ms(change.spread_s),
            )
            for change in (self.iteration, *self.tasks)
        ]
        return table(("", "before ms", "after ms", "saved ms", "± ms"), rows)

    def __str__(self) -> str:
        return self.format()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text, with numbers to the right."""
    from tabulate import tabulate

    align = ("left", *("right",) * (len(headers) - 1))
    return tabulate(rows, headers=list(headers), disable_numparse=True, colalign=align)


def ms(seconds: float) -> str:
    """Milliseconds, to the microsecond."""
    return f"{1e3 * seconds:.3f}"
