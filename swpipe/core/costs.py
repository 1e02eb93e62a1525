"""Costs of tasks: measured by the profiler, or given by the user for another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self, cast

from swpipe.core.files import read_text, read_typed, write_atomically
from swpipe.core.messages import listed, shown
from swpipe.core.plan import PULL
from swpipe.core.task import LABEL_RULE, NAME_RULE, ByTask, TaskRef, is_label, is_name, names_of
from swpipe.core.task_memory import TaskMemory
from swpipe.errors import PlanError, Problem

MOST_US = 1e12
"""The longest time in a cost model, eleven days: sums of such times lose no microsecond."""


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The cost of one run of one task.

    Attributes:
        host_us: Microseconds for which the task occupies its thread, busy or blocked.
        gil_us: The part of ``host_us`` in which the thread holds the interpreter lock, which only
            one thread at a time can hold.
        device_us: Microseconds of device work that the task queues; 0 without streams.
        resources: Names of resources that only one task at a time can use, such as a communicator
            or a direction of the copy engine. They are held during the device work or, without
            any, during the host work.
        blocks: Whether the task returns only when its device work is done, as with ``.item()`` or a
            copy from pageable memory. ``host_us`` does not include this wait.
        host_each_us: ``host_us`` in each sampled iteration, in their order; () if it is the same
            in all of them, or only the mean is known. The lock is held for the same part of each.
        device_each_us: ``device_us`` in each sampled iteration, likewise.
    """

    host_us: float = 0.0
    gil_us: float = 0.0
    device_us: float = 0.0
    resources: tuple[str, ...] = ()
    blocks: bool = False
    host_each_us: tuple[float, ...] = ()
    device_each_us: tuple[float, ...] = ()

    @property
    def total_us(self) -> float:
        """Microseconds that the task takes when it runs alone: host time, then device time."""
        return self.host_us + self.device_us

    def scaled(self, factor: float) -> TaskCost:
        """Return the cost with every time multiplied by ``factor``."""
        return TaskCost.mean([self], factor)

    def each(self, iterations: int) -> Iterator[TaskCost]:
        """Yield the cost in each of ``iterations`` sampled iterations."""
        # A task without a table costs its mean in each of them.
        host = self.host_each_us or (self.host_us,) * iterations
        device = self.device_each_us or (self.device_us,) * iterations
        for host_us, device_us in zip(host, device, strict=True):
            yield replace(self, host_us=host_us, device_us=device_us)

    @classmethod
    def mean(cls, costs: Sequence[TaskCost], factor: float = 1.0) -> TaskCost:
        """Return the mean of each time, times ``factor``, and the mean of tables by iteration.

        The result has no table if the costs have tables of different lengths. It has the resources
        of all costs. It blocks if one of the costs blocks.
        """
        times: dict[str, Any] = {}
        for key in _TIMES:
            times[key] = factor * fmean(getattr(cost, key) for cost in costs)
        for key in _TABLES:
            each = [getattr(cost, key) for cost in costs]
            # An empty table beside a full one is another length: its iterations are unknown.
            columns = zip(*each, strict=True) if len({*map(len, each)}) == 1 else ()
            times[key] = tuple(factor * fmean(column) for column in columns)
        # Without duplicates, in the order of their first use.
        resources = tuple(dict.fromkeys(name for cost in costs for name in cost.resources))
        return cls(resources=resources, blocks=any(cost.blocks for cost in costs), **times)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of a plan's tasks: their means, and how they vary over sampled iterations.

    The tables of all tasks are of the same iterations, so that tasks that are slow together stay
    slow together.

    Attributes:
        tasks: Task name to its cost; ``PULL`` to the cost of calling the loader, 0 if left out.
        handover_us: Microseconds from the moment at which a thread wakes another thread until that
            thread runs.
        memory: The memory that the tasks hold, if it is known, from
            ``swpipe.profiler.measure_memory``.

    Raises:
        PlanError: A cost is negative, above ``MOST_US`` or not a number, a ``gil_us`` is above its
            ``host_us``, no task can have a name, or tables have different lengths.
    """

    tasks: Mapping[str, TaskCost]
    handover_us: float = 0.0
    memory: TaskMemory | None = None

    def __post_init__(self) -> None:
        # Lookups accept a task in place of its name.
        object.__setattr__(self, "tasks", ByTask(self.tasks))
        problems = [
            Problem(f"task {shown(name)}: {text}", (name,))
            for name, cost in self.tasks.items()
            for text in _faults(name, cost)
        ]
        # With a faulty cost, a table may be no tuple and have no length.
        lengths = {} if problems else self._lengths()
        if len({*lengths.values()}) > 1:
            each = listed([f"{table} {length}" for table, length in lengths.items()])
            rule = "the tables of all tasks are of the same sampled iterations"
            mend = "measure the costs again, or leave the tables out"
            problems.append(Problem(f"tables have different lengths ({each}): {rule}; {mend}"))
        if not _is_time(self.handover_us):
            problems.append(Problem(f"handover_us is {shown(self.handover_us)}: {_RULE}"))
        if problems:
            raise PlanError(problems)

    @classmethod
    def mean(cls, models: Sequence[CostModel]) -> Self:
        """Return the mean of each time, over batches or ranks, with the union of the resources.

        A task blocks if it blocks in one of the models. The memory is the one with the largest peak
        of one iteration alone.

        Raises:
            PlanError: A model has no cost for a task of the first model.
            ValueError: ``models`` is empty.
        """
        if not models:
            raise ValueError("models is empty: give at least one cost model")
        rows = [model.of(models[0].tasks) for model in models]
        tasks = {name: TaskCost.mean([row[name] for row in rows]) for name in models[0].tasks}
        # Memory is not averaged: blocks of different runs need not correspond.
        known = [model.memory for model in models if model.memory is not None]
        memory = max(known, key=lambda memory_: memory_.serial_peak(models[0].tasks), default=None)
        return cls(tasks, fmean(model.handover_us for model in models), memory)

    @property
    def iterations(self) -> int:
        """The number of sampled iterations in the tables; 0 without tables."""
        return max(self._lengths().values(), default=0)

    def _lengths(self) -> dict[str, int]:
        """Return the lengths of all tables that are not empty, by task and field."""
        tables = {
            f"{name}.{key}": getattr(cost, key)
            for name, cost in self.tasks.items()
            for key in _TABLES
        }
        return {where: len(table) for where, table in tables.items() if table}

    def with_scaled(self, factors: Mapping[str, float]) -> Self:
        """Return the model in which the times of some tasks are multiplied by their factors."""
        scaled = {name: self.tasks[name].scaled(factor) for name, factor in factors.items()}
        return replace(self, tasks={**self.tasks, **scaled})

    def of(self, tasks: Iterable[TaskRef]) -> dict[str, TaskCost]:
        """Return the costs of these tasks, by name, in the order given.

        Raises:
            PlanError: Tasks have no cost; the error lists them.
        """
        names = names_of(tasks)
        missing = [name for name in names if name not in self.tasks]
        if missing:
            rule = f"has no cost (there are costs for: {listed(self.tasks)})"
            mend = "measure it, or write it into the model"
            raise PlanError([Problem(f"task {shown(n)} {rule}: {mend}", (n,)) for n in missing])
        return {name: self.tasks[name] for name in names}

    def to_json(self) -> str:
        """Return the model as JSON, without zeros; ``from_json`` returns an equal model."""
        rows = {
            name: {key: value for key, value in asdict(cost).items() if value}
            for name, cost in self.tasks.items()
        }
        # A model without memory has no key for it, and equals what from_json makes of that.
        memory = {} if self.memory is None else {"memory": self.memory.to_dict()}
        data = {"handover_us": self.handover_us, "tasks": rows, **memory}
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a model from JSON, also from the cost file of a schedulable pipeline.

        The latter is one object: task to ``cpu_us`` and ``gpu_us``, which are host and device time.

        Raises:
            json.JSONDecodeError: ``text`` is not JSON.
            PlanError: ``text`` is JSON, but not a cost model.
        """
        data: object = json.loads(text)
        # The cost file of a schedulable pipeline has no key of its own: its rows tell.
        if isinstance(data, dict) and data and all(map(_of_schedulable, data.values())):
            given = {"cpu_us": "host_us", "gpu_us": "device_us"}
            data = {"tasks": {n: {given[k]: us for k, us in r.items()} for n, r in data.items()}}
        # The values are checked where the model is made, with those that are written in Python.
        try:
            return cast(Self, read_typed(data, cls, "costs"))
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError([Problem(str(error))]) from error

    def save(self, path: str | Path) -> None:
        """Write the model to a JSON file; after a failure, the old file is unchanged."""
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model from a JSON file, with the errors of ``read_text`` and ``from_json``."""
        return cls.from_json(read_text(path))


def _of_schedulable(row: object) -> bool:
    return isinstance(row, dict) and {*row} == {"cpu_us", "gpu_us"}


_TIMES = ("host_us", "gil_us", "device_us")
_TABLES = ("host_each_us", "device_each_us")


_RULE = f"times are microseconds from 0 to {MOST_US:g}"


def _is_time(value: object) -> bool:
    # bool is a subclass of int, and true is no time.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= MOST_US  # false for nan, which compares false with every number


def _faults(name: object, cost: object) -> Iterable[str]:
    if isinstance(name, str) and name != PULL and not is_name(name):
        yield NAME_RULE
    if not isinstance(cost, TaskCost):
        yield f"its cost is {shown(cost)}; give a TaskCost"
        return
    times = {key: getattr(cost, key) for key in _TIMES}
    for key, value in times.items():
        if not _is_time(value):
            yield f"{key} is {shown(value)}: {_RULE}"
    # Compared only if both are times, so that each wrong value is reported once.
    if all(map(_is_time, times.values())) and cost.gil_us > cost.host_us:
        rule = "the lock is held for a part of the host time"
        yield f"gil_us is {cost.gil_us}, but host_us only {cost.host_us}: {rule}"
    if not isinstance(cost.resources, tuple) or not all(
        isinstance(r, str) and is_label(r) for r in cost.resources
    ):
        yield f"resources is {shown(cost.resources)}; give names: {LABEL_RULE}"
    for key in _TABLES:
        table = getattr(cost, key)
        if not isinstance(table, tuple) or not all(map(_is_time, table)):
            yield f"{key} is {shown(table)}: give a time for each sampled iteration; {_RULE}"
    blocks: object = cost.blocks
    if not isinstance(blocks, bool):
        yield f"blocks is {shown(blocks)}: give true or false"
