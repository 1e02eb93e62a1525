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
    """Exposed times on one batch. All times are seconds per iteration.

    Attributes:
        baseline_s: Mean wall time of an iteration in which all tasks run.
        baseline_median_s: The median. If it is much shorter, a few slow iterations take the time.
        baseline_spread_s: Half-width of the 95% interval of ``baseline_s``.
        exposed_s: Task to the wall time that would be saved if the task cost nothing, limited to
            the range from 0 to ``baseline_s``.
        raw_s: Task to the exposed time as measured, which noise may put outside of that range.
        spread_s: Half-width of the 95% interval of ``raw_s``.
        replay_s: Task to the time of the replay of its outputs, which was added to ``raw_s``.
        in_others_s: Task to the tasks that take less time on their threads while it is shortcut,
            and how much less: a forward that is replayed leaves less to the backward. See
            ``own_s``.
        host_s: Task to how long it occupies the thread it runs on.
        blocked_s: The part of ``host_s`` in which the thread waits off the CPU: it sleeps, or waits
            for a file, a lock or a device. A thread that waits in a busy loop (the default in CUDA)
            is on the CPU: see ``host_s``.
        core_s: The part of ``host_s`` in which the thread could run, but other threads had the
            cores.
        device_s: Task to how long the work that it queued takes on its stream; empty without
            streams.
        busy_s: Thread group to the time in which each of its threads runs tasks; under the plan
            only.
        advice: At most three changes that promise most. Another plan comes first.
        num_warmup: Iterations before each visit that were not timed.
        num_measure: Mean number of iterations timed in each visit.
        num_rounds: Number of visits behind each figure; fewer for some tasks if the profile was
            limited by seconds or by the spread.
        put_back: The objects whose state was saved before profiling and restored after it, each
            with the place where it was found, and its type.
        already_shortcut: Tasks that were shortcut when profiling started. They stayed shortcut
            and were not measured.
        not_measured: Task to the reason why it could not be measured. It has no exposed time.
        interrupted: Whether Ctrl-C came before all rounds were measured; ``num_rounds`` is the
            number of rounds that were.
        other_load: The load of other processes on the machine; None if the machine does not
            report it.
        ranks: The times of all ranks, the same in the results of all ranks; empty on a single
            rank. See ``rank_waits``.
        collectives: The tasks in which ranks meet: the globally ordered ones.
        loader: The pace of the loader in the long run; None if it was not called. The time of the
            start of a pass is part of the iteration, and of what ``"<pull>"`` exposes.
    """

    # Without this, the class would inherit the ``__repr__`` generated for ``Figures``.
    __repr__ = Rows.__repr__  # instead of the one of ``Figures``

    def format_report(self) -> str:
        """Return a summary line, a table with one row per task, and notes."""
        return result_text.one(self)

    def records(self) -> list[dict[str, Any]]:
        """Return a row of plain values per task; all times are milliseconds."""
        rows = []
        # Tasks that could not be measured have a row as well, with None for their exposed time.
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
        """Return the changes from this profile to ``after``, with 95% intervals."""
        # A task may exist in one of the profiles only; the order is that of this profile.
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
        """Return a result made from plain data, as ``json.loads`` returns it.

        Raises:
            ValueError: The keys are not the attributes of a result, or a value has another type.
                Attributes that have defaults may be missing, as in a file of an earlier version.
        """
        result: Self = read_typed(data, cls, "a profile result", {PipelinePlan: _plan_of})
        # ``read_typed`` checks each field on its own; the fields that share their tasks are
        # compared here.
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
    # ``asdict`` would copy a plan field by field, but plans have a JSON format of their own.
    plans = [one.plan for one in result.advice]
    data = asdict(replace(result, advice=tuple(replace(one, plan=None) for one in result.advice)))
    for advice, plan in zip(data["advice"], plans, strict=True):
        with suppress(TypeError):  # stream objects of a plan cannot be saved
            advice["plan"] = plan and json.loads(plan.to_json())
    return data


def _plan_of(data: Any) -> PipelinePlan:
    """Return the plan of a piece of advice, which is JSON text in files of an earlier version."""
    return PipelinePlan.from_json(data if isinstance(data, str) else json.dumps(data))


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
        found = cls(results)
        found.loop = loop
        return found

    def format_report(self) -> str:
        """Return one batch in full, or several with a summary line each in one table."""
        if self.loop is None:
            return result_text.several(self)
        return f"{result_text.one(self.loop)}\n\n{result_text.side_by_side(self)}"

    def diff(self, after: ProfileResults) -> tuple[ProfileDiff, ...]:
        """Return the changes from these profiles to those of the same batches, batch by batch.

        Raises:
            ValueError: The profiles are of different batches.
        """
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
        # Without a result of the loop, the format is the plain list of earlier versions.
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
