"""The results of a profile: data that prints as a table, saves as JSON, and draws a bar chart."""

from __future__ import annotations

import json
import math
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TextIO, overload

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.files import write_atomically
from swpipe.core.messages import listed
from swpipe.core.plain_data import parse_json
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan
from swpipe.core.records import Rows
from swpipe.core.task import ByTask
from swpipe.profiler import result_text
from swpipe.profiler.diff import ProfileDiff, TimeChange
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.plot import Bars, bar_chart, bar_chart_svg
from swpipe.profiler.rank_times import RankTimes, RankWait, rank_waits
from swpipe.profiler.spread import Estimate, ms

LIMITING = 0.9
"""A thread group that is busy for so much of an iteration may set its pace."""

MIN_BLOCKED_S, MIN_BLOCKED_SHARE = 1e-4, 0.25

_BY_TASK = (
    "exposed_s", "raw_s", "spread_s", "replay_s", "in_others_s", "host_s", "blocked_s", "device_s",
    "not_measured",
)  # fmt: skip
_COLUMNS = ("exposed", "own", "raw", "spread", "host", "blocked", "device", "replay")
_OF_EARLIER_VERSIONS = {"disturbed"}


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


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and what it promises.

    Attributes:
        change: What to change, in words.
        task: The task that it is about; "" for a plan that moves several.
        saved_s: How much shorter an iteration is predicted to be, in seconds.
        spread_s: Half-width of the interval of ``saved_s``.
        limit: What limits iterations then; "" where that is not predicted.
        not_moved: Why the task is not moved instead; "" if it is.
        plan: The plan to try, as JSON (``PipelinePlan.from_json``); "" if the plan stays.
    """

    change: str
    task: str
    saved_s: float
    spread_s: float
    limit: str = ""
    not_moved: str = ""
    plan: str = ""

    @property
    def text(self) -> str:
        """One sentence or two."""
        then = f"; then limited by {self.limit}" if self.limit else ""
        why = f" Not moved: {self.not_moved}." if self.not_moved else ""
        return f"{self.change}: saves {ms(self.saved_s)} ± {ms(self.spread_s)} ms{then}.{why}"


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

    def _repr_html_(self) -> str:
        """The bar chart and the report, for a notebook."""
        text = super()._repr_html_()
        try:
            return bar_chart_svg(self._bars()) + text
        except (ModuleNotFoundError, ValueError):  # no matplotlib, or nothing to draw
            return text

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
        exposed_s: Task to the wall time saved if it cost nothing; neither negative nor more than an
            iteration.
        raw_s: The same as it was measured: noise may make it either.
        spread_s: Half-width of the 95% interval of ``raw_s``.
        replay_s: How long the replay of the task's outputs took, which was added to ``raw_s``.
        in_others_s: Task to those tasks that take less of their threads while it is shortcut, and
            how much less: a forward that is replayed leaves less to the backward. See ``own_s``.
        host_s: How long the task occupies the thread it runs on.
        blocked_s: The part of ``host_s`` in which the thread is off the CPU: it sleeps, waits for
            a file, a lock or a device, or is preempted. A thread that waits in a busy loop (the
            default in CUDA) is on the CPU: compare ``host_s``.
        device_s: How long the work that the task queued takes on its stream; empty without streams.
        busy_s: Thread group to the time in which it runs tasks; only under the plan.
        joint: Tasks that were shortcut together: those of the busiest thread group, and those of
            all groups that are ``limiting`` if these are several; only under the plan.
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
        no_work: Tasks that have nothing to do: they take less than 20 us and 1% of an iteration,
            and iterations are no shorter without them.
        other_load: What other processes used of the machine; None where it does not tell.
        ranks: The times of all ranks, alike in the results of all of them; empty where there is
            one. See ``rank_waits``.
        collectives: The tasks in which ranks meet: the globally ordered ones.
    """

    batch: str
    mode: Literal["serial", "pipelined"]
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
    no_work: tuple[str, ...] = ()
    other_load: OtherLoad | None = None
    ranks: tuple[RankTimes, ...] = ()
    collectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _BY_TASK:
            object.__setattr__(self, name, ByTask(getattr(self, name)))

    # ------------------------------------------------------------------ what follows from it

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measured tasks, in serial order."""
        return tuple(self.exposed_s)

    @property
    def step(self) -> Estimate:
        """An iteration, with its interval."""
        return Estimate(self.baseline_s, self.baseline_spread_s)

    def exposed(self, name: str) -> Estimate | None:
        """The exposed time of a task as it was measured; None where it was not."""
        return Estimate(self.raw_s[name], self.spread_s[name]) if name in self.raw_s else None

    @property
    def own_s(self) -> Mapping[str, float]:
        """Task to the part of ``exposed_s`` that it takes itself, on its thread and its stream.

        The rest is what others take less without it (``in_others_s``), or do faster.
        """
        return {
            name: min(exposed_s, self.host_s[name] + self.device_s.get(name, 0.0))
            for name, exposed_s in self.exposed_s.items()
        }

    @property
    def rank_waits(self) -> tuple[RankWait, ...]:
        """Which ranks wait for another one, and how long; the longest comes first."""
        return rank_waits(self.ranks, self.collectives)

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

    @property
    def limiting(self) -> tuple[str, ...]:
        """Thread groups that are busy for 90% of an iteration; the busiest come first.

        If there are several, none of them alone makes iterations much shorter: the tasks of each
        have little exposed time, whatever they take.
        """
        return limiting(self.busy_s, self.baseline_s)

    @property
    def costs(self) -> CostModel:
        """What the tasks cost, for a planner or the simulator."""
        return costs_of(self.host_s, self.device_s)

    def diff(self, after: ProfileResult) -> ProfileDiff:
        """What changed from this profile to ``after``, with 95% intervals."""
        names = dict.fromkeys((*self.host_s, *after.host_s))
        return ProfileDiff(
            TimeChange.of("iteration", self.step, after.step),
            tuple(TimeChange.of(name, self.exposed(name), after.exposed(name)) for name in names),
            self.batch + (f", {self.mode} to {after.mode}" if after.mode != self.mode else ""),
        )

    # --------------------------------------------------------------------------- as other things

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

    def add_to_tensorboard(self, writer: Any, step: int | None = None) -> None:
        """Add scalars in milliseconds: the baseline, and each task's exposed time.

        Args:
            writer: A ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``.
            step: The global step that they belong to.
        """
        writer.add_scalar(f"swpipe/{self.mode}/baseline_ms", 1e3 * self.baseline_s, step)
        for name, exposed_s in self.exposed_s.items():
            writer.add_scalar(f"swpipe/{self.mode}/exposed_ms/{name}", 1e3 * exposed_s, step)

    def _bars(self) -> list[Bars]:
        label = f"{self.batch}, {self.mode}: {1e3 * self.baseline_s:.1f} ms per iteration"
        return [Bars(label, self.exposed_s, self.spread_s)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A result from plain data, as ``json.loads`` returns it.

        Raises:
            ValueError: The keys are not the attributes of a result. Those that have defaults may be
                missing, as in a file of an earlier version.
        """
        every = {each.name for each in fields(cls)}
        needed = {e.name for e in fields(cls) if e.default is e.default_factory is MISSING}
        if isinstance(data, dict):
            data = {key: data[key] for key in data if key not in _OF_EARLIER_VERSIONS}
        if not isinstance(data, dict) or not needed <= set(data) <= every:
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            rule = f"{sorted(needed)}, and may have {sorted(every - needed)}"
            raise ValueError(f"a profile result has the keys {rule}; not {got}")
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        _check_figures(data)
        try:
            parts = {
                "joint": tuple(Joint(**{**e, "tasks": tuple(e["tasks"])}) for e in data["joint"]),
                "advice": tuple(Advice(**each) for each in data["advice"]),
                "ranks": tuple(RankTimes(**each) for each in data.get("ranks", ())),
                "other_load": OtherLoad(**load) if (load := data.get("other_load")) else None,
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"a part of a profile result is damaged: {error}") from error
        return cls(**{**data, **lists, **parts})


def costs_of(host_s: Mapping[str, float], device_s: Mapping[str, float]) -> CostModel:
    """What tasks cost that take so many seconds."""
    return CostModel(
        {
            name: TaskCost(1e6 * seconds, device_us=1e6 * device_s.get(name, 0.0))
            for name, seconds in host_s.items()
        }
    )


def busy_s(plan: PipelinePlan, host_s: Mapping[str, float]) -> dict[str, float]:
    """Thread group to the seconds per iteration in which it runs tasks, or calls the loader."""
    busy: dict[str, float] = defaultdict(float)
    if PULL in host_s:
        busy[plan.pull_group or DEFAULT_GROUP] += host_s[PULL]
    for name, schedule in plan.schedule.items():
        busy[schedule.thread_group] += host_s[name]
    return dict(busy)


def limiting(busy: Mapping[str, float], step_s: float) -> tuple[str, ...]:
    """Thread groups that may set the pace; the busiest come first."""
    found = [group for group, seconds in busy.items() if seconds >= LIMITING * step_s]
    return tuple(sorted(found, key=lambda group: -busy[group]))


def _check_figures(data: Mapping[str, Any]) -> None:
    """Refuse what cannot be the times of a profile, in a file that was edited or damaged."""
    if wrong := [key for key in data if key.endswith("_s") and not _is_times(data[key])]:
        raise ValueError(f"a profile result has numbers of seconds in {listed(wrong)}")
    kinds = {"exposed_s": dict, "raw_s": dict, "spread_s": dict, "joint": list, "advice": list}
    for key, kind in (kinds | {"host_s": dict, "batch": str, "mode": str}).items():
        if not isinstance(data[key], kind):
            raise ValueError(f"a profile result has a {kind.__name__} in {key}")
    tasks = data["exposed_s"].keys()
    if not (tasks == data["raw_s"].keys() == data["spread_s"].keys() <= data["host_s"].keys()):
        raise ValueError("a profile result has the same tasks in exposed_s, raw_s and spread_s")


def _is_times(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_times, value.values()))
    return isinstance(value, int | float) and math.isfinite(value)


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
        """One batch in full; several with a summary line each, side by side in one table."""
        return result_text.several(self._results)

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
        return json.dumps([asdict(result) for result in self], indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = parse_json(text)
        if not isinstance(data, list):
            raise ValueError(f"profile results are a JSON list, not {type(data).__name__}")
        return cls(ProfileResult.from_dict(entry) for entry in data)
