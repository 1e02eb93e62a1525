"""What a profile found, as data: it prints, goes to JSON and back, and draws itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TextIO, overload

Mode = Literal["serial", "pipelined"]

BLOCKS_FROM_S = 1e-4
BLOCKS_FROM_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Exposed times on one batch. All times are seconds per iteration.

    Attributes:
        batch: The batch's label.
        mode: ``"serial"``, or ``"pipelined"`` for a measurement under the plan.
        baseline_s: Wall time of an iteration with all tasks running.
        baseline_spread_s: Half-width of its error bar.
        exposed_s: Task to the wall time that is saved when it costs nothing; never negative.
        raw_s: The same as it was measured, with its sign.
        spread_s: Half-width of its error bar: the truth lies within ``raw_s`` plus or minus this,
            and a task that costs nothing reads zero within it, practically always.
        host_s: How long the task holds the thread that it runs on.
        blocked_s: The part of that in which the thread was off the CPU: asleep, waiting for a
            file, a lock or a device, or pushed aside by other work. A thread that waits in a busy
            loop (as CUDA's do by default) counts as on the CPU: compare ``host_s``.
        num_warmup: Iterations before each window that were not timed.
        num_measure: Iterations in each window.
        num_rounds: Windows behind each figure.
        put_back: Whose state was saved before and put back after profiling: where it was found,
            and its type.
        already_shortcut: Tasks that were shortcut when profiling began. They stayed so, cost
            nothing, and were not measured.
    """

    batch: str
    mode: Mode
    baseline_s: float
    baseline_spread_s: float
    exposed_s: Mapping[str, float]
    raw_s: Mapping[str, float]
    spread_s: Mapping[str, float]
    host_s: Mapping[str, float]
    blocked_s: Mapping[str, float]
    num_warmup: int
    num_measure: int
    num_rounds: int
    put_back: tuple[str, ...] = ()
    already_shortcut: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that were measured, in serial order."""
        return tuple(self.exposed_s)

    @property
    def blocking(self) -> tuple[str, ...]:
        """Tasks that block the host: off the CPU for a quarter of their time, and 0.1 ms.

        The longest come first.
        """
        found = [
            name
            for name, blocked_s in self.blocked_s.items()
            if blocked_s >= max(BLOCKS_FROM_S, BLOCKS_FROM_SHARE * self.host_s[name])
        ]
        return tuple(sorted(found, key=lambda name: -self.blocked_s[name]))

    def format_report(self) -> str:
        """The table that ``print_report`` prints."""
        from swpipe.profiler.tables import format_one

        return format_one(self)

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task: exposed time with its spread, host and blocked time."""
        _print(self.format_report(), file)

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart with error bars into a file; the ending tells the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from swpipe.profiler.plot import bar_chart

        bar_chart((self,), path)

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back unchanged."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A result from what ``to_json`` wrote.

        Raises:
            ValueError: The text is no JSON object with exactly the attributes of a result.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A result from plain data, as ``json.loads`` gives it.

        Raises:
            ValueError: Not exactly the attributes of a result.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a profile result has exactly the keys {sorted(names)}, not {got}")
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})

    def save(self, path: str | Path) -> None:
        """Write JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


class ProfileResults(Sequence[ProfileResult]):
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

    def __iter__(self) -> Iterator[ProfileResult]:
        return iter(self._results)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProfileResults) and self._results == other._results

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ProfileResults({list(self._results)!r})"

    def format_report(self) -> str:
        """The table that ``print_report`` prints."""
        from swpipe.profiler.tables import format_side_by_side

        return format_side_by_side(self._results)

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task and, side by side, the columns of each batch."""
        _print(self.format_report(), file)

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart, a bar per batch at each task, into a file; the ending tells the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from swpipe.profiler.plot import bar_chart

        bar_chart(self._results, path)

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back unchanged: a list of results."""
        return json.dumps([asdict(result) for result in self._results], indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Results from what ``to_json`` wrote.

        Raises:
            ValueError: The text is no JSON list of results.
        """
        data = json.loads(text)
        if not isinstance(data, list):
            raise ValueError(f"profile results are a JSON list, not {type(data).__name__}")
        return cls(ProfileResult.from_dict(entry) for entry in data)

    def save(self, path: str | Path) -> None:
        """Write JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _print(text: str, file: TextIO | None) -> None:
    (sys.stdout if file is None else file).write(text + "\n")
