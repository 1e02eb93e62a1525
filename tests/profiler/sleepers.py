"""Tasks of known cost: they stand on a virtual clock, so that what they take is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from tests.support.virtual_clock import TimedHost


def sleeper(host: TimedHost, milliseconds: float) -> Callable[[IterContext], None]:
    """A task's function that sleeps."""

    def fn(ctx: IterContext) -> None:
        host.sleep(milliseconds / 1e3)

    return fn


def sleepers(host: TimedHost, **milliseconds: float) -> list[PipelineTask]:
    """Tasks that sleep, by name."""
    return [PipelineTask(name, sleeper(host, ms), pure=True) for name, ms in milliseconds.items()]


def overlapped(groups: dict[str, Iterable[str]]) -> PipelinePlan:
    """Each group of tasks in a thread group and a stage of its own, in the order given."""
    placed = [
        (name, TaskSchedule(stage=stage, thread_group=group))
        for stage, (group, names) in enumerate(groups.items())
        for name in names
    ]
    names = [name for name, _ in placed]
    return PipelinePlan(dict(placed), deps=list(zip(names[1:], names, strict=False)))
