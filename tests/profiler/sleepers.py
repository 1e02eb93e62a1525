"""Tasks of known cost: they sleep, and tell how long they really slept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule


class Sleeper:
    """A function that sleeps; half a machine's sleeps are longer than they should be."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.took_s: list[float] = []

    def __call__(self, ctx: IterContext) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds)
        self.took_s.append(time.perf_counter() - begin)

    @property
    def true_s(self) -> float:
        """How long it sleeps on this machine, now."""
        return median(self.took_s)


def sleepers(**milliseconds: float) -> tuple[list[PipelineTask], dict[str, Sleeper]]:
    """Tasks that sleep, by name."""
    functions = {name: Sleeper(ms / 1e3) for name, ms in milliseconds.items()}
    return [PipelineTask(name, fn) for name, fn in functions.items()], functions


def overlapped(groups: dict[str, Iterable[str]]) -> PipelinePlan:
    """Each group of tasks in a thread group and a stage of its own, in the order given."""
    placed = [
        (name, TaskSchedule(stage=stage, thread_group=group))
        for stage, (group, names) in enumerate(groups.items())
        for name in names
    ]
    names = [name for name, _ in placed]
    return PipelinePlan(dict(placed), deps=list(zip(names[1:], names, strict=False)))


def near(measured_s: float, true_s: float) -> bool:
    """Within 5% or 0.3 ms."""
    return abs(measured_s - true_s) <= max(0.05 * true_s, 0.3e-3)


def measured_within(attempts: int, measure: Callable[[], dict[str, tuple[Any, Any]]]) -> None:
    """Measure until each figure is near its truth; other work may spoil a measurement, not all.

    Args:
        attempts: How often to try.
        measure: Gives name to (measured, true), in seconds.
    """
    found = {}
    for _ in range(attempts):
        found = measure()
        if all(near(*pair) for pair in found.values()):
            return
    raise AssertionError(f"(measured, true) in seconds: {found}")
