"""The results of a profile: data that prints as a table, saves as JSON, and draws a bar chart."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

from swpipe.core.files import Readers, read_typed, write_atomically
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.records import Rows
from swpipe.profiler import result_text
from swpipe.profiler.diff import ProfileDiff, TimeChange
from swpipe.profiler.figures import Figures
from swpipe.profiler.plot import Bars, bar_chart, bar_chart_svg
from swpipe.profiler.rank_differences import RankDifferences, rank_differences
from swpipe.profiler.rank_times import RankWait, rank_waits


class Report(Rows):
    """A result that prints as a table, saves as JSON, and has rows for other tools."""

    __slots__ = ()

    @abstractmethod
    def format_report(self) -> str:
        """Return the table that ``print_report`` prints above a legend."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the result as JSON text, of which ``from_json`` makes an equal object."""

    @abstractmethod
    def _bars(self) -> list[Bars]:
        """Return the bars that ``plot`` draws."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that ``to_json`` returned.

        Raises:
            ValueError: ``text`` is something else.
        """

    def as_text(self) -> str:
        return self.format_report()

    def _repr_html_(self) -> str:
        """Return the bar chart and the report as HTML, for a notebook."""
        text = super()._repr_html_()
        # A notebook shows the text alone if there can be no chart: without matplotlib, or without
        # bars.
        try:
            return bar_chart_svg(self._bars()) + text
        except (ModuleNotFoundError, ValueError):  # no matplotlib, or nothing to draw
            return text

    def print_report(self, file: TextIO | None = None) -> None:
        """Print a table with one row per task, to standard output by default."""
        # The legend is printed once, also below several results.
        text = f"{self.format_report()}\n{result_text.LEGEND}\n"
        (sys.stdout if file is None else file).write(text)

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart with error bars; the suffix of ``path`` selects the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: There are no results.
        """
        bar_chart(self._bars(), path)

    def save(self, path: str | Path) -> None:
        """Write the result to a file as JSON."""
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, repr=False)
class ProfileResult(Figures, Report):
    """Exposed times on one batch, or of a loop. All times are seconds per iteration.

    Attributes:
        iteration: The times of an iteration in which all tasks run.
        tasks: Task to its figures, in serial order; see ``TaskFigures``.
        busy_s: Thread group to the time in which each of its threads runs tasks; under the plan
            only.
        advice: At most three changes that promise most. Another plan comes first.
        measurement: How the result was measured; see ``Measurement``.
        ranks: The times of all ranks, the same in the results of all ranks; empty on a single
            rank. See ``rank_waits`` and ``differences``.
        collectives: The tasks in which ranks meet: the globally ordered ones.
        loader: The pace of the loader in the long run; None if it was not called. The time of the
            start of a pass is part of the iteration, and of what ``"<pull>"`` exposes.
    """

    @property
    def rank_waits(self) -> tuple[RankWait, ...]:
        """Which ranks wait for another rank, and how long; the longest wait comes first."""
        return rank_waits(self.ranks, self.collectives)

    @property
    def differences(self) -> RankDifferences | None:
        """The differences between the ranks, for a planner or the simulator; None on one rank."""
        costs = [of.costs for of in self.ranks]
        return rank_differences(costs, self.collectives) if costs else None

    def format_report(self) -> str:
        """Return a summary line, a table with one row per task, and notes."""
        return result_text.one(self)

    def records(self) -> list[dict[str, Any]]:
        """Return a row of plain values per task; all times are milliseconds."""
        rows = []
        exposed_s = self.exposed_s
        own_s = self.own_s
        # Tasks that could not be measured have a row as well, with None for their exposed time.
        for name, task in self.measured.items():
            raw = task.exposed
            seconds = {
                "exposed": exposed_s.get(name),
                "own": own_s.get(name),
                "raw": None if raw is None else raw.value_s,
                "spread": None if raw is None else raw.spread_s,
                "host": task.thread.host_s,
                "blocked": task.thread.blocked_s,
                "device": task.device_s,
                "replay": None if raw is None else task.replay_s,
                "baseline": self.baseline_s,
            }
            row: dict[str, Any] = {"batch": self.batch, "mode": self.mode, "task": name}
            row |= {f"{what}_ms": None if s is None else 1e3 * s for what, s in seconds.items()}
            rows.append({**row, "not_measured": task.not_measured})
        return rows

    def _bars(self) -> list[Bars]:
        label = f"{self.batch}, {self.mode}: {1e3 * self.baseline_s:.1f} ms per iteration"
        return [Bars(label, self.exposures)]

    def diff(self, after: ProfileResult) -> ProfileDiff:
        """Return the changes from this profile to ``after``, with 95% intervals."""
        # A task may exist in one of the profiles only; the order is that of this profile.
        names = dict.fromkeys((*self.measured, *after.measured))
        return ProfileDiff(
            TimeChange("iteration", self.step, after.step),
            tuple(TimeChange(name, self.exposed(name), after.exposed(name)) for name in names),
            self.batch + (f", {self.mode} to {after.mode}" if after.mode != self.mode else ""),
        )

    def to_json(self) -> str:
        return json.dumps(plain(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return a result made from plain data, as ``json.loads`` returns it.

        Raises:
            ValueError: The keys are not the attributes of a result, or a value has another type.
                Attributes that have defaults may be missing.
        """
        result: Self = read_typed(data, cls, "a profile result", _READERS)
        return result


def plain(result: ProfileResult) -> dict[str, Any]:
    """Return a result as data that JSON can hold."""
    # A plan has a format of its own, in which it is also read.
    advice = [each.to_dict() for each in result.advice]
    return {**asdict(replace(result, advice=())), "advice": advice}


_READERS: Readers = {PipelinePlan: lambda data: PipelinePlan.from_json(json.dumps(data))}


class ProfileResults(Report, tuple[ProfileResult, ...]):  # noqa: SLOT001 - it has a loop
    """The results of several batches, in the order of the batches.

    Attributes:
        loop: The result of all batches, run cyclically. It is the result of the loop if the batches
            are a sample of its batches. None for results that were combined by other means.
    """

    loop: ProfileResult | None = None

    @classmethod
    def of(cls, results: Iterable[ProfileResult], loop: ProfileResult | None) -> Self:
        """Return the results, together with the result of the loop."""
        several = cls(results)
        several.loop = loop
        return several

    def format_report(self) -> str:
        """Return one batch in full, or several with a summary line each in one table."""
        # The notes of the loop hold for its batches, so these are shown without notes.
        if self.loop is None:
            return result_text.several(self)
        return f"{result_text.one(self.loop)}\n\n{result_text.side_by_side(self)}"

    def diff(self, after: ProfileResults) -> tuple[ProfileDiff, ...]:
        """Return the changes from these profiles to those of the same batches, batch by batch.

        Raises:
            ValueError: The profiles are of different batches.
        """
        # Batches are matched by their names, since a later profile may be of them in another order.
        before, now = ({result.batch: result for result in each} for each in (self, after))
        if before.keys() != now.keys() or not now:
            ours, theirs = (listed(list(each)) for each in (before, now))
            raise ValueError(f"the profiles are of different batches: {ours}, and {theirs}")
        return tuple(result.diff(now[batch]) for batch, result in before.items())

    def records(self) -> list[dict[str, Any]]:
        """Return a row of plain values per batch and task; all times are milliseconds."""
        return [row for result in self for row in result.records()]

    def _bars(self) -> list[Bars]:
        return [bars for result in self for bars in result._bars()]

    def to_json(self) -> str:
        loop = self.loop and plain(self.loop)
        return json.dumps({"loop": loop, "batches": [plain(result) for result in self]}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        # A single result is as good as several.
        if isinstance(data, dict) and "batches" not in data:
            return cls([ProfileResult.from_dict(data)])
        file = read_typed(data, _ResultsFile, "a file of profile results", _READERS)
        return cls.of(file.batches, file.loop)


@dataclass(frozen=True, slots=True)
class _ResultsFile:
    """The content of a file that ``ProfileResults.save`` writes."""

    loop: ProfileResult | None
    batches: tuple[ProfileResult, ...]
