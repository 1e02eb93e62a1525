"""A schedule: the tasks of a loop, in stages, and the streams that they name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swpipe.core.messages import shown
from swpipe.schedulable.data_slot import DataSlot
from swpipe.schedulable.declared_task import Task


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks that run together; in each period, those of the next stage come after them.

    Raises:
        TypeError: ``tasks`` is no list of tasks.
    """

    tasks: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _all("tasks", self.tasks, Task, "tasks"))
        for task in self.tasks:
            if not all(isinstance(slot, DataSlot) for slot in (*task.reads, *task.writes)):
                raise TypeError(
                    f"{type(task).__name__}.__init__ does not call super().__init__(), which makes "
                    "it a task"
                )


@dataclass(frozen=True, slots=True)
class Schedule:
    """All stages, in the order in which they run (seed section 3.2).

    Raises:
        TypeError: ``stages`` is no list of stages, or ``stream_slots`` none of names.
    """

    stages: tuple[Stage, ...] = ()
    stream_slots: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", _all("stages", self.stages, Stage, "stages"))
        names = _all("stream_slots", self.stream_slots, str, "names of streams")
        object.__setattr__(self, "stream_slots", names)

    def all_tasks(self) -> tuple[Task, ...]:
        """The tasks of all stages, as they were declared."""
        return tuple(task for stage in self.stages for task in stage.tasks)

    @property
    def max_lookahead(self) -> int:
        """The largest lookahead; 0 for a schedule without tasks."""
        return max((task.lookahead for task in self.all_tasks()), default=0)

    @property
    def in_flight_batches(self) -> int:
        """How many batches are in flight when the pipeline is full."""
        return self.max_lookahead + 1


def _all(field: str, given: Any, kind: type, what: str) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{field} is {shown(given)}: give a tuple of {what}")
    found = tuple(given)
    for one in found:
        if not isinstance(one, kind):
            raise TypeError(f"{field} has {shown(one)}: give a tuple of {what}")
    return found
