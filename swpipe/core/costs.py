"""What each task costs: measured by the profiler, or written by hand for a machine elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from swpipe.core.errors import PlanError, Problem


@dataclass(frozen=True, slots=True)
class TaskCost:
    """What one run of one task takes. All times are microseconds.

    Attributes:
        host_us: The submitting thread is busy, or blocked.
        gil_us: The part of ``host_us`` in which it holds the interpreter lock; no two threads do
            that at once.
        device_us: Work that it queues on its stream; none on a device without streams.
        resources: What only one task at a time can use: a communicator, a direction of the copy
            engine. Held while the device work runs or, where there is none, the host work.
    """

    host_us: float = 0.0
    gil_us: float = 0.0
    device_us: float = 0.0
    resources: tuple[str, ...] = ()

    @property
    def total_us(self) -> float:
        """Host time, then device time: how long a task takes that runs alone."""
        return self.host_us + self.device_us


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of a plan's tasks.

    Attributes:
        tasks: Task name to its cost.
        handover_us: What it takes a thread to wake once what it waits for has come; microseconds.

    Raises:
        PlanError: A cost that is negative or no number, or a ``gil_us`` above its ``host_us``. It
            lists all of them.
    """

    tasks: Mapping[str, TaskCost]
    handover_us: float = 0.0

    def __post_init__(self) -> None:
        problems = [p for name, cost in self.tasks.items() for p in _problems(name, cost)]
        if not _is_time(self.handover_us):
            problems.append(Problem(f"handover_us is {self.handover_us!r}: {_RULE}"))
        if problems:
            raise PlanError(problems)
        object.__setattr__(self, "tasks", dict(self.tasks))

    @classmethod
    def mean(cls, models: Sequence[CostModel]) -> Self:
        """The mean of each time: over batches, or over ranks. Resources are those of any.

        Args:
            models: At least one; of the same tasks.

        Raises:
            PlanError: One lacks a task that the first one has.
            ValueError: There are no models.
        """
        if not models:
            raise ValueError("models is empty: give at least one cost model")
        rows = [model.of(models[0].tasks) for model in models]
        tasks = {name: _mean([row[name] for row in rows]) for name in models[0].tasks}
        return cls(tasks, fmean(model.handover_us for model in models))

    def of(self, names: Iterable[str]) -> dict[str, TaskCost]:
        """The costs of these tasks, in their order.

        Raises:
            PlanError: Some have none; it lists them.
        """
        names = tuple(names)
        missing = [name for name in names if name not in self.tasks]
        if missing:
            known = ", ".join(self.tasks) or "none"
            raise PlanError(
                [
                    Problem(
                        f"task {name!r} has no cost (there are costs for: {known}): measure it, or "
                        "write it into the model",
                        (name,),
                    )
                    for name in missing
                ]
            )
        return {name: self.tasks[name] for name in names}

    def to_json(self) -> str:
        """The model as JSON; ``from_json`` gives an equal one back. Zeros are left out."""
        rows = {
            name: {key: value for key, value in asdict(cost).items() if value}
            for name, cost in self.tasks.items()
        }
        return json.dumps({"handover_us": self.handover_us, "tasks": rows}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The model that a JSON text describes.

        Raises:
            json.JSONDecodeError: The text is not JSON; the message has line and column.
            PlanError: It is JSON, but no cost model.
        """
        data: object = json.loads(text)
        if not isinstance(data, dict) or not isinstance(data.get("tasks"), dict):
            raise PlanError([Problem('a cost model is a JSON object with an object "tasks"')])
        known = {f.name for f in fields(TaskCost)}
        problems = []
        for name, row in data["tasks"].items():
            if not isinstance(row, dict):
                problems.append(Problem(f"tasks.{name} is {row!r}: it must be an object", (name,)))
                continue
            problems += [
                Problem(f"tasks.{name}: unknown key {key!r}; known are {', '.join(sorted(known))}")
                for key in row
                if key not in known
            ]
        if unknown := sorted(set(data) - {"tasks", "handover_us"}):
            problems.append(Problem(f"unknown keys in the cost model: {', '.join(unknown)}"))
        if problems:
            raise PlanError(problems)
        tasks = {
            name: TaskCost(**{**row, "resources": _names(row.get("resources", ()))})
            for name, row in data["tasks"].items()
        }
        return cls(tasks, data.get("handover_us", 0.0))

    def save(self, path: str | Path) -> None:
        """Write the model to a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model from a JSON file; errors as for its text."""
        return cls.from_json(Path(path).read_text())


def _mean(costs: Sequence[TaskCost]) -> TaskCost:
    return TaskCost(
        fmean(cost.host_us for cost in costs),
        fmean(cost.gil_us for cost in costs),
        fmean(cost.device_us for cost in costs),
        tuple(dict.fromkeys(name for cost in costs for name in cost.resources)),
    )


_RULE = "times are microseconds, finite and not negative"


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def _names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _problems(name: str, cost: object) -> Iterable[Problem]:
    if not isinstance(cost, TaskCost):
        yield Problem(f"task {name!r}: its cost is {cost!r}; give a TaskCost", (name,))
        return
    times = {key: getattr(cost, key) for key in ("host_us", "gil_us", "device_us")}
    for key, value in times.items():
        if not _is_time(value):
            yield Problem(f"task {name!r}: {key} is {value!r}: {_RULE}", (name,))
    if all(map(_is_time, times.values())) and cost.gil_us > cost.host_us:
        yield Problem(
            f"task {name!r}: gil_us is {cost.gil_us}, but host_us only {cost.host_us}: the lock is "
            "held for a part of the host time",
            (name,),
        )
    if not isinstance(cost.resources, tuple) or not all(
        isinstance(r, str) and r for r in cost.resources
    ):
        yield Problem(f"task {name!r}: resources is {cost.resources!r}; give names", (name,))
