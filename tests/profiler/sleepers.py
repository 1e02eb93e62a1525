"""Tasks and loaders of known cost on a virtual clock: their times are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

import swpipe.profiler.costing
from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from tests.support.virtual_clock import TimedHost


class FakeContender:
    """A stand-in for the contender, which had the lock while tasks released it."""

    held_s = 0.0

    def __init__(self, host: TimedHost) -> None:
        self.host = host

    def times(self) -> tuple[float, float]:
        return self.host.perf_counter(), self.held_s

    def __enter__(self) -> FakeContender:
        return self

    def __exit__(self, *failure: object) -> None:
        return None


def contend(monkeypatch: pytest.MonkeyPatch, host: TimedHost) -> FakeContender:
    """Measure the need for the lock on the host's clock; return the contender."""
    contender = FakeContender(host)
    monkeypatch.setattr(swpipe.profiler.costing, "GilContender", lambda: contender)
    return contender


def sleeper(host: TimedHost, milliseconds: float) -> Callable[[IterContext], None]:
    """Return a task's function that sleeps."""

    def fn(ctx: IterContext) -> None:
        host.sleep(milliseconds / 1e3)

    return fn


def sleepers(host: TimedHost, **milliseconds: float) -> list[PipelineTask]:
    """Return tasks that sleep, by name."""
    return [PipelineTask(name, sleeper(host, ms), pure=True) for name, ms in milliseconds.items()]


def overlapped(groups: dict[str, Iterable[str]]) -> PipelinePlan:
    """Return a plan with a thread group and a stage for each group of tasks, in this order."""
    placed = [
        (name, TaskSchedule(stage=stage, thread_group=group))
        for stage, (group, names) in enumerate(groups.items())
        for name in names
    ]
    names = [name for name, _ in placed]
    return PipelinePlan(dict(placed), deps=list(zip(names[1:], names, strict=False)))


class Ahead:
    """A loader that makes batches on threads of its own, and has at most eight ready.

    ``ms``: The time to make a batch. ``starts_ms``: The time of a pass before its first batch.
    ``length``: The number of batches in a pass.
    """

    def __init__(
        self, host: TimedHost, ms: float, starts_ms: float = 0.0, length: int = 100_000
    ) -> None:
        self.host, self.ms, self.starts_ms, self.length = host, ms, starts_ms, length
        self.passes = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.host.sleep(self.starts_ms / 1e3)
        begun_s = self.host.perf_counter()  # of the batch that is being made
        for number in range(self.length):
            begun_s = max(begun_s, self.host.perf_counter() - 8 * self.ms / 1e3) + self.ms / 1e3
            self.host.sleep(max(0.0, begun_s - self.host.perf_counter()))
            yield number


class InTurn(Ahead):
    """A loader that makes each batch in the call."""

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.host.sleep(self.ms / 1e3)
            yield number
