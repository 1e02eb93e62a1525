"""Results made of plain figures, for tests of what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from swpipe.profiler import ProfileResult
from swpipe.profiler.figures import LoopTimes, TaskFigures
from swpipe.profiler.host import ThreadTimes
from swpipe.profiler.spread import Estimate

L = TypeVar("L", bound=LoopTimes)

NOTHING = TaskFigures(ThreadTimes(0.0))
"""The figures of a task that takes no time, and was not measured."""

ON_THREAD = ("host_s", "blocked_s", "core_s", "error_s")


def tasks_of(**by_task: Mapping[str, Any]) -> dict[str, TaskFigures]:
    """Return figures from maps of task to ``host_s``, ``raw_s``, ``spread_s`` and so on."""
    names = dict.fromkeys(name for values in by_task.values() for name in values)
    return {name: _changed(NOTHING, name, by_task) for name in names}


def changed(result: L, **by_task: Mapping[str, Any]) -> L:
    """Return a result, or a rank's times, with other figures of some tasks; see ``tasks_of``."""
    tasks = {name: _changed(task, name, by_task) for name, task in result.tasks.items()}
    return replace(result, tasks=tasks)


def of_step(result: L, mean_s: float) -> L:
    """Return a result, or the times of a rank, with another mean time of an iteration."""
    mean = replace(result.iteration.mean, value_s=mean_s)
    return replace(result, iteration=replace(result.iteration, mean=mean))


def measured(result: ProfileResult, **changes: Any) -> ProfileResult:
    """Return a result with another measurement."""
    return replace(result, measurement=replace(result.measurement, **changes))


def _changed(task: TaskFigures, name: str, by_task: Mapping[str, Mapping[str, Any]]) -> TaskFigures:
    given = {key: values[name] for key, values in by_task.items() if name in values}
    thread = {key: given.pop(key) for key in ON_THREAD if key in given}
    if "device_s" in given:
        given["device_each_s"] = (given.pop("device_s"),)
    raw = {new: given.pop(key) for new, key in EXPOSED.items() if key in given}
    if raw:
        given["exposed"] = replace(task.exposed or Estimate(0.0, 0.0), **raw)
    return replace(task, thread=replace(task.thread, **thread), **given)


EXPOSED = {"value_s": "raw_s", "spread_s": "spread_s"}
