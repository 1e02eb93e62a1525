"""Rounds, medians, spreads, and the rows of the table."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of one or more values."""
        values = sorted(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} .. {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        what: The name of the measurement.
        ours: swpipe's figure, with its unit.
        beside: The time or size that it is compared with, with its unit.
        ratio: Ours over that; None where the row only informs.
        bar: The limit for the ratio's median; None if the row is for information.
    """

    what: str
    ours: str
    beside: str = ""
    ratio: Spread | None = None
    bar: float | None = None

    @property
    def missed(self) -> bool:
        return self.bar is not None and (self.ratio is None or self.ratio.median > self.bar)

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "MISS" if self.missed else "PASS"


def interleaved(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Run the measures alternately, ``rounds`` times; return one list of results per measure.

    Every second round goes backwards, so that no measure always follows the same one.
    """
    results: list[list[float]] = [[] for _ in measures]
    for turn in range(rounds):
        for index in sorted(range(len(measures)), reverse=turn % 2 == 1):
            results[index].append(measures[index]())
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return ours over theirs, round by round: a slow phase of the machine affects both."""
    return Spread.of(a / b for a, b in zip(ours, theirs, strict=True))


def compared(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    label: str,
    bar: float | None = None,
    *,
    digits: int = 2,
) -> Row:
    """Return a row that compares two measures of the same rounds; ``label`` names the second."""
    return Row(
        what=what,
        ours=f"{Spread.of(ours).text(digits)} {unit}",
        beside=f"{label} {Spread.of(theirs).text(digits)} {unit}".lstrip(),
        ratio=ratios(ours, theirs),
        bar=bar,
    )


def off_by(predicted: Sequence[float], true: Sequence[float]) -> Spread:
    """Return the larger over the smaller, round by round: 1.05 is 5% off, in either direction."""
    ratio = ratios(predicted, true)
    return ratio if ratio.median >= 1 else ratios(true, predicted)


def tolerated(what: str, value: float, limit: float, unit: str, digits: int = 0) -> Row:
    """Return a row for a figure with an upper limit."""
    return Row(
        what=what,
        ours=f"{value:+,.{digits}f} {unit}".rstrip(),
        beside=f"tolerated {limit:,} {unit}".rstrip(),
        ratio=Spread.of([value / limit]),
        bar=1.0,
    )


def timed_ms(rounds: int, fn: Callable[[], object], repeats: int = 1) -> list[float]:
    """Return the time of ``fn`` in ms: per round, the mean of ``repeats`` calls."""

    def ms() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            fn()
        return (time.perf_counter() - begin) / repeats * 1e3

    return interleaved(rounds, ms)[0]


def resident_mib() -> float:
    """Return the resident memory of this process in MiB, or 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def sharpen_timers() -> None:
    """Ask Linux to end sleeps of this thread, and of threads it starts, without the usual slack.

    By default a sleep may end 50 us late.
    """
    if sys.platform == "linux":
        set_timer_slack = 29
        ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    cells = [
        (
            row.what,
            row.ours,
            row.beside,
            row.ratio.text(3) if row.ratio else "",
            f"<= {row.bar:g}" if row.bar is not None else "",
            row.verdict,
        )
        for row in rows
    ]
    head = ("what", "swpipe", "beside it", "ratio", "bar", "")
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = (head, ["-" * width for width in widths], *cells)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def report(rows: Sequence[Row]) -> int:
    """Print the table and the rows that missed their bars; return 1 if there are any, else 0."""
    print(table(rows))
    missed = [row.what for row in rows if row.missed]
    if missed:
        print(f"\n{len(missed)} missed: {'; '.join(missed)}")
    return 1 if missed else 0
