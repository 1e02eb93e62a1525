"""The results of a profile: data that prints as a table, saves as JSON, and draws a bar chart."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TextIO, overload

from swpipe.core.files import write_atomically
from swpipe.core.messages import listed
from swpipe.core.plain_data import parse_json
from swpipe.core.records import Rows
from swpipe.core.task import ByTask
from swpipe.profiler.advice import Advice
from swpipe.profiler.diff import Change, ProfileDiff, ms, table
from swpipe.profiler.plot import Bars, bar_chart
from swpipe.profiler.spread import Estimate
from swpipe.profiler.together import limiting

Mode = Literal["serial", "pipelined"]

MIN_BLOCKED_S = 1e-4
MIN_BLOCKED_SHARE = 0.25

_BY_TASK = (
    "exposed_s", "raw_s", "spread_s", "replay_s", "in_others_s", "host_s", "blocked_s", "device_s",
    "not_measured",
)  # fmt: skip
_READ = (
    "exposed: how much shorter a mean iteration is if the task costs nothing; ±: 95 of 100\n"
    "such intervals contain the true value; < x: not told apart from 0; in others: what these\n"
    "take less"
)
_EXPOSED = ("exposed ms", "± ms", "% of baseline")
_SLOW = 0.05


@dataclass(frozen=True, slots=True)
class Joint:
    """Several tasks that were shortcut together. All times are seconds per iteration.

    Attributes:
        what: What they have in common, in words.
        tasks: Their names.
        raw_s: How much shorter an iteration is if all of them cost nothing.
        spread_s: Half-width of the 95% interval of ``raw_s``.
    """

    what: str
    tasks: tuple[str, ...]
    raw_s: float
    spread_s: float


class Report(Rows):
    """What prints as a table, saves as JSON, and has rows for other tools."""

    __slots__ = ()

    @abstractmethod
    def format_report(self) -> str:
        """The table that ``print_report`` prints."""

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

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task; to standard output by default."""
        (sys.stdout if file is None else file).write(self.format_report() + "\n")

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


@dataclass(frozen=True, slots=True)
class ProfileResult(Report):
    """Exposed times on one batch. All times are seconds per iteration.

    Attributes:
        baseline_s: Mean wall time of an iteration in which all tasks run.
        baseline_median_s: The median. Where it is much shorter, few slow iterations take the time.
        baseline_spread_s: Half-width of the 95% interval of ``baseline_s``.
        exposed_s: Task to the wall time saved if it cost nothing; never negative.
        raw_s: The same with its sign: noise may make it negative.
        spread_s: Half-width of the 95% interval of ``raw_s``.
        replay_s: How long the replay of the task's outputs took, which was added to ``raw_s``.
        in_others_s: Task to those tasks that take less of their threads while it is shortcut, and
            how much less: a forward that is replayed leaves less to the backward.
        host_s: How long the task occupies the thread it runs on.
        blocked_s: The part of ``host_s`` in which the thread is off the CPU: it sleeps, waits for
            a file, a lock or a device, or is preempted. A thread that waits in a busy loop (the
            default in CUDA) is on the CPU: compare ``host_s``.
        device_s: How long the work that the task queued takes on its stream; empty without streams.
        busy_s: Thread group to the time in which it runs tasks; only under the plan.
        joint: Tasks that were shortcut together: those of the busiest thread group, and those of
            all groups that are ``limiting`` if these are several; only under the plan.
        advice: The changes that promise most, at most three; the best comes first.
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
        disturbed: How many visits were measured again, since another process took a core from them;
            None where the machine does not tell.
    """

    batch: str
    mode: Mode
    baseline_s: float
    baseline_median_s: float
    baseline_spread_s: float
    exposed_s: Mapping[str, float]
    raw_s: Mapping[str, float]
    spread_s: Mapping[str, float]
    replay_s: Mapping[str, float]
    in_others_s: Mapping[str, Mapping[str, float]]
    host_s: Mapping[str, float]
    blocked_s: Mapping[str, float]
    device_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    joint: tuple[Joint, ...]
    advice: tuple[Advice, ...]
    num_warmup: int
    num_measure: int
    num_rounds: int
    put_back: tuple[str, ...] = ()
    already_shortcut: tuple[str, ...] = ()
    not_measured: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    disturbed: int | None = None

    def __post_init__(self) -> None:
        for name in _BY_TASK:
            object.__setattr__(self, name, ByTask(getattr(self, name)))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measured tasks, in serial order."""
        return tuple(self.exposed_s)

    @property
    def blocking(self) -> tuple[str, ...]:
        """Tasks that block the host: off the CPU for 25% of their time and at least 0.1 ms.

        The longest come first.
        """
        found = [
            name
            for name, blocked_s in self.blocked_s.items()
            if blocked_s >= max(MIN_BLOCKED_S, MIN_BLOCKED_SHARE * self.host_s[name])
        ]
        return tuple(sorted(found, key=lambda name: -self.blocked_s[name]))

    def format_report(self) -> str:
        """A summary line, a table with one row per task, and notes."""
        times = {"host ms": self.host_s, "blocked ms": self.blocked_s}
        if self.device_s:
            times["device ms"] = self.device_s
        times["replay ms"] = self.replay_s
        rows = []
        for name in self.host_s:
            others = (f"{other} {ms(s)}" for other, s in self.in_others_s.get(name, {}).items())
            cells = (ms(of[name]) if name in of else "" for of in times.values())
            rows.append((name, *self._exposed_cells(name), *cells, ", ".join(others)))
        titles = ("task", *_EXPOSED, *times, "in others ms")
        return "\n".join([self._summary(), table(titles, rows), *self._notes(), _READ])

    def records(self) -> list[dict[str, Any]]:
        """A row per task, of plain values; all times are milliseconds."""
        rows = []
        for name in self.host_s:
            row: dict[str, Any] = {"batch": self.batch, "mode": self.mode, "task": name}
            for what in ("exposed", "raw", "spread", "host", "blocked", "device", "replay"):
                seconds = getattr(self, f"{what}_s").get(name)
                row[f"{what}_ms"] = None if seconds is None else 1e3 * seconds
            row["baseline_ms"] = 1e3 * self.baseline_s
            row["not_measured"] = self.not_measured.get(name, "")
            rows.append(row)
        return rows

    def add_to_tensorboard(self, writer: Any, step: int | None = None) -> None:
        """Add scalars in milliseconds: the baseline, and each task's exposed time.

        Args:
            writer: A ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``.
            step: The global step that they belong to.
        """
        writer.add_scalar(f"swpipe/{self.mode}/baseline_ms", 1e3 * self.baseline_s, step)
        for name, exposed_s in self.exposed_s.items():
            writer.add_scalar(f"swpipe/{self.mode}/exposed_ms/{name}", 1e3 * exposed_s, step)

    def diff(self, after: ProfileResult) -> ProfileDiff:
        """What changed from this profile to ``after``, with 95% intervals."""
        names = dict.fromkeys((*self.host_s, *after.host_s))
        steps = [Estimate(each.baseline_s, each.baseline_spread_s) for each in (self, after)]
        return ProfileDiff(
            Change.of("iteration", *steps),
            tuple(Change.of(name, self._exposed(name), after._exposed(name)) for name in names),
        )

    def _exposed(self, name: str) -> Estimate | None:
        if name not in self.raw_s:
            return None
        return Estimate(self.raw_s[name], self.spread_s[name])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A result from plain data, as ``json.loads`` returns it.

        Raises:
            ValueError: The keys are not exactly the attributes of a result.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a profile result has exactly the keys {sorted(names)}, not {got}")
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        joint = tuple(Joint(**{**each, "tasks": tuple(each["tasks"])}) for each in data["joint"])
        advice = tuple(Advice(**each) for each in data["advice"])
        return cls(**{**data, **lists, "joint": joint, "advice": advice})

    def _exposed_cells(self, name: str) -> tuple[str, str, str]:
        """The cells below ``_EXPOSED`` for one task; "<" is what is not told apart from 0."""
        exposed = self._exposed(name)
        if exposed is None:
            return "not measured" if name in self.host_s else "", "", ""
        return self._cells(*exposed)

    def _cells(self, value_s: float, spread_s: float) -> tuple[str, str, str]:
        below = 0 < spread_s >= abs(value_s)
        shown_s = max(0.0, value_s) + spread_s if below else value_s
        share = shown_s / self.baseline_s if self.baseline_s else 0.0
        sign = "< " if below else ""
        return f"{sign}{ms(shown_s)}", ms(spread_s), f"{sign}{100 * share:.1f}"

    def _summary(self) -> str:
        slow = 1 - self.baseline_median_s / self.baseline_s if self.baseline_s else 0.0
        tail = f", so slow ones take {100 * slow:.0f}%" if slow >= _SLOW else ""
        return (
            f"{self.batch}, {self.mode}: {ms(self.baseline_s)} ± "
            f"{ms(self.baseline_spread_s)} ms per iteration, median "
            f"{ms(self.baseline_median_s)}{tail} "
            f"({self.num_rounds} rounds, {self.num_measure} iterations per visit)"
        )

    @property
    def limiting(self) -> tuple[str, ...]:
        """Thread groups that are busy for 90% of an iteration; the busiest come first.

        If there are several, none of them alone makes iterations much shorter: the tasks of each
        have little exposed time, whatever they take.
        """
        return limiting(self.busy_s, self.baseline_s)

    def _limits(self) -> str:
        step = f"nearly all of {ms(self.baseline_s)} ms"
        busy = [f"{group} ({ms(self.busy_s[group])} ms)" for group in self.limiting]
        if len(busy) > 1:
            return f"several thread groups are busy {step}, so all have to do less: {listed(busy)}"
        if busy:
            return f"one thread group is busy {step}: {busy[0]}"
        longest = max(self.busy_s, key=lambda group: self.busy_s[group])
        return (
            f"no thread group is busy {step}, {longest} the longest with "
            f"{ms(self.busy_s[longest])} ms: iterations wait for dependences, a device or others"
        )

    def _notes(self, on_batch: str = "") -> Iterator[str]:
        if self.busy_s:
            yield f"limits iterations{on_batch}: {self._limits()}"
        blocking = [f"{name} ({ms(self.blocked_s[name])} ms)" for name in self.blocking]
        yield f"blocks the host{on_batch}: {', '.join(blocking) or 'no task'}"
        for name, why in self.not_measured.items():
            yield f"not measured{on_batch}: {name}, since iterations with its shortcut fail: {why}"
        for joint in self.joint:
            value, spread, share = self._cells(joint.raw_s, joint.spread_s)
            yield (
                f"together{on_batch}: {value} ± {spread} ms ({share}%) for {joint.what}: "
                f"{', '.join(joint.tasks)}"
            )
        for number, advice in enumerate(self.advice, 1):
            yield f"do next{on_batch}, {number}: {advice.text}"
        if self.interrupted:
            yield f"interrupted{on_batch}: not all rounds were measured"
        if self.disturbed is None:
            yield "disturbance by other processes: this machine does not tell"
        elif self.disturbed:
            yield f"disturbed by other processes{on_batch}: {self.disturbed} visits, measured again"
        if self.already_shortcut:
            yield f"shortcut already, so not measured: {', '.join(self.already_shortcut)}"
        found = (
            listed(self.put_back) if self.put_back else "generators only; no other state was found"
        )
        yield f"put back: {found}"

    def _bars(self) -> list[Bars]:
        label = f"{self.batch}, {self.mode}: {1e3 * self.baseline_s:.1f} ms per iteration"
        return [Bars(label, self.exposed_s, self.spread_s)]


class ProfileResults(Report, Sequence[ProfileResult]):
    """The results of several batches, in the order of the batches."""

    def __init__(self, results: Iterable[ProfileResult]) -> None:
        self._results = tuple(results)

    @overload
    def __getitem__(self, index: int) -> ProfileResult: ...

    @overload
    def __getitem__(self, index: slice) -> ProfileResults: ...

    def __getitem__(self, index: int | slice) -> ProfileResult | ProfileResults:
        if isinstance(index, slice):
            return ProfileResults(self._results[index])
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProfileResults) and self._results == other._results

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ProfileResults({list(self._results)!r})"

    def format_report(self) -> str:
        """One summary line per batch, and a table with one row per task and columns per batch."""
        if not self._results:
            return "no batches were profiled"
        tasks = dict.fromkeys(name for result in self for name in result.host_s)
        headers = ["task"]
        for result in self:
            headers += [f"{result.batch}\n{_EXPOSED[0]}", *(f"\n{title}" for title in _EXPOSED[1:])]
        rows = [[n, *(cell for r in self for cell in r._exposed_cells(n))] for n in tasks]
        notes = dict.fromkeys(note for r in self for note in r._notes(f" on {r.batch}"))
        return "\n".join([*(r._summary() for r in self), table(headers, rows), *notes, _READ])

    def records(self) -> list[dict[str, Any]]:
        """A row per batch and task, of plain values; all times are milliseconds."""
        return [row for result in self for row in result.records()]

    def _bars(self) -> list[Bars]:
        return [bars for result in self for bars in result._bars()]

    def to_json(self) -> str:
        return json.dumps([asdict(result) for result in self], indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = parse_json(text)
        if not isinstance(data, list):
            raise ValueError(f"profile results are a JSON list, not {type(data).__name__}")
        return cls(ProfileResult.from_dict(entry) for entry in data)
