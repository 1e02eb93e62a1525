"""The results of a profile: data that prints as a table, saves as JSON, and draws a bar chart."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

from swpipe.core.files import read_typed, write_atomically
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.records import Rows
from swpipe.profiler import result_text
from swpipe.profiler.diff import ProfileDiff, TimeChange
from swpipe.profiler.figures import Figures
from swpipe.profiler.plot import Bars, bar_chart, bar_chart_svg

_COLUMNS = ("exposed", "own", "raw", "spread", "host", "blocked", "device", "replay")


class Report(Rows):
    """What prints as a table, saves as JSON, and has rows for other tools."""

    __slots__ = ()

    @abstractmethod
    def format_report(self) -> str:
        """The table that ``print_report`` prints, above a legend."""

    @abstractmethod
    def to_json(self) -> str:
        """JSON text; ``from_json`` returns an equal object."""

    @abstractmethod
    def _bars(self) -> list[Bars]:
        """What ``plot`` draws."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: ``text`` is something else.
        """

    def as_text(self) -> str:
        return self.format_report()

    def _repr_html_(self) -> str:
        """The bar chart and the report, for a notebook."""
        text = super()._repr_html_()
        try:
            return bar_chart_svg(self._bars()) + text
        except (ModuleNotFoundError, ValueError):  # no matplotlib, or nothing to draw
            return text

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task; to standard output by default."""
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
        """Write JSON to a file."""
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, repr=False)
class ProfileResult(Figures, Report):
    """Exposed times on one batch. All times are seconds per iteration.

    Attributes:
        baseline_s: Mean wall time of an iteration in which all tasks run.
        baseline_median_s: The median. Where it is much shorter, few slow iterations take the time.
        baseline_spread_s: Half-width of the 95% interval of ``baseline_s``.
        exposed_s: Task to the wall time saved if it cost nothing; neither negative nor more than an
            iteration.
        raw_s: The same as it was measured: noise may make it either.
        spread_s: Half-width of the 95% interval of ``raw_s``.
        replay_s: How long the replay of the task's outputs took, which was added to ``raw_s``.
        in_others_s: Task to those tasks that take less of their threads while it is shortcut, and
            how much less: a forward that is replayed leaves less to the backward. See ``own_s``.
        host_s: How long the task occupies the thread it runs on.
        blocked_s: The part of ``host_s`` in which the thread waits off the CPU: it sleeps, or waits
            for a file, a lock or a device. A thread that waits in a busy loop (the default in CUDA)
            is on the CPU: compare ``host_s``.
        core_s: The part of ``host_s`` in which the thread could run, and others had the cores.
        device_s: How long the work that the task queued takes on its stream; empty without streams.
        busy_s: Thread group to the time in which each of its threads runs tasks; under the plan.
        advice: The changes that promise most, at most three; another plan comes first.
        num_warmup: Iterations before each visit that were not timed.
        num_measure: Iterations timed in each visit, in the mean.
        num_rounds: Visits behind each figure; of some, if there was a limit in seconds or to the
            spread.
        put_back: The objects whose state was saved before profiling and restored after it: where
            each was found, and its type.
        already_shortcut: Tasks that were shortcut when profiling started. They stayed shortcut
            and were not measured.
        not_measured: Task to the reason why it could not be measured. It has no exposed time.
        interrupted: Ctrl-C came before all rounds were measured; ``num_rounds`` is how many were.
        other_load: What other processes used of the machine; None where it does not tell.
        ranks: The times of all ranks, alike in the results of all of them; empty where there is
            one. See ``rank_waits``.
        collectives: The tasks in which ranks meet: the globally ordered ones.
        loader: What the loader does in the long run; None where it was not called. What the start
            of a pass takes is in the time of an iteration, and in what ``"<pull>"`` exposes.
    """

    __repr__ = Rows.__repr__  # not that of ``Figures``

    def format_report(self) -> str:
        """A summary line, a table with one row per task, and notes."""
        return result_text.one(self)

    def records(self) -> list[dict[str, Any]]:
        """A row per task, of plain values; all times are milliseconds."""
        rows = []
        for name in self.host_s:
            row: dict[str, Any] = {"batch": self.batch, "mode": self.mode, "task": name}
            for what in _COLUMNS:
                seconds = getattr(self, f"{what}_s").get(name)
                row[f"{what}_ms"] = None if seconds is None else 1e3 * seconds
            row["baseline_ms"] = 1e3 * self.baseline_s
            row["not_measured"] = self.not_measured.get(name, "")
            rows.append(row)
        return rows

    def _bars(self) -> list[Bars]:
        label = f"{self.batch}, {self.mode}: {1e3 * self.baseline_s:.1f} ms per iteration"
        return [Bars(label, self.exposed_s, self.spread_s)]

    def diff(self, after: ProfileResult) -> ProfileDiff:
        """What changed from this profile to ``after``, with 95% intervals."""
        names = dict.fromkeys((*self.host_s, *after.host_s))
        return ProfileDiff(
            TimeChange.of("iteration", self.step, after.step),
            tuple(TimeChange.of(name, self.exposed(name), after.exposed(name)) for name in names),
            self.batch + (f", {self.mode} to {after.mode}" if after.mode != self.mode else ""),
        )

    def to_json(self) -> str:
        return json.dumps(plain(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A result from plain data, as ``json.loads`` returns it.

        Raises:
            ValueError: The keys are not the attributes of a result, or a value has another type.
                Attributes that have defaults may be missing, as in a file of an earlier version.
        """
        result: Self = read_typed(data, cls, "a profile result", {PipelinePlan: _plan_of})
        tasks = result.exposed_s.keys()
        alike = tasks == result.raw_s.keys() == result.spread_s.keys()
        if not (alike and tasks <= result.host_s.keys()):
            raise ValueError(
                "a profile result has the same tasks in exposed_s, raw_s and spread_s, all of them "
                "in host_s"
            )
        return result


def plain(result: ProfileResult) -> dict[str, Any]:
    """Return a result as data that JSON can hold."""
    plans = [one.plan for one in result.advice]
    data = asdict(replace(result, advice=tuple(replace(one, plan=None) for one in result.advice)))
    for advice, plan in zip(data["advice"], plans, strict=True):
        with suppress(TypeError):  # it has streams that no file can hold
            advice["plan"] = plan and json.loads(plan.to_json())
    return data


def _plan_of(data: Any) -> PipelinePlan:
    """Return the plan of an advice; it is JSON text in a file of an earlier version."""
    return PipelinePlan.from_json(data if isinstance(data, str) else json.dumps(data))


class ProfileResults(Report, tuple[ProfileResult, ...]):  # noqa: SLOT001 - it has a loop
    """The results of several batches, in the order of the batches.

    Attributes:
        loop: The result of all of them, one after the other and again: the loop's, if they are a
            sample of its batches. None for results that were put together otherwise.
    """

    loop: ProfileResult | None = None

    @classmethod
    def of(cls, results: Iterable[ProfileResult], loop: ProfileResult | None) -> Self:
        """Return the results, with that of the loop."""
        found = cls(results)
        found.loop = loop
        return found

    def format_report(self) -> str:
        """One batch in full; several with a summary line each, side by side in one table."""
        if self.loop is None:
            return result_text.several(self)
        return f"{result_text.one(self.loop)}\n\n{result_text.side_by_side(self)}"

    def diff(self, after: ProfileResults) -> tuple[ProfileDiff, ...]:
        """What changed from these profiles to those of the same batches, batch by batch.

        Raises:
            ValueError: They are of different batches.
        """
        before, now = ({result.batch: result for result in each} for each in (self, after))
        if before.keys() != now.keys() or not now:
            ours, theirs = (listed(list(each)) for each in (before, now))
            raise ValueError(f"the profiles are of different batches: {ours}, and {theirs}")
        return tuple(result.diff(now[batch]) for batch, result in before.items())

    def records(self) -> list[dict[str, Any]]:
        """A row per batch and task, of plain values; all times are milliseconds."""
        return [row for result in self for row in result.records()]

    def _bars(self) -> list[Bars]:
        return [bars for result in self for bars in result._bars()]

    def to_json(self) -> str:
        batches = [plain(result) for result in self]
        if self.loop is None:
            return json.dumps(batches, indent=2)
        return json.dumps({"loop": plain(self.loop), "batches": batches}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        loop = None
        if isinstance(data, dict) and {*data} == {"loop", "batches"}:
            loop = ProfileResult.from_dict(data["loop"])
            data = data["batches"]
        if not isinstance(data, list):
            rule = 'a JSON list, or an object with "loop" and "batches"'
            raise ValueError(f"profile results are {rule}, not {type(data).__name__}")
        return cls.of((ProfileResult.from_dict(entry) for entry in data), loop)
