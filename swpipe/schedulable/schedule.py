"""A schedule: the tasks of a loop, in stages; which waits for which, and the order of a period.

Each way to wait is a dependence with a distance (``swpipe.core.dependence``). A task with lookahead
k has stage L - k, L the largest lookahead, so that the lag of a dependence is

    lag = lookahead of the producer - lookahead of the consumer + distance

which seed appendix A derives for ``cross_iter_depends_on``. The engine of the seed looks an event
up in the slot ``offset = lookahead of the consumer - distance``; here events are kept as long as a
dependence may ask for them, so that none has rotated out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from swpipe.core.dependence import topological
from swpipe.core.messages import shown
from swpipe.schedulable.declared_task import SameProgressSyncSide, Task
from swpipe.schedulable.slot_context import BATCH, DataSlot

Waits: TypeAlias = Mapping[str, Sequence[str]]
"""Task to the other streams on which something lies that it waits for."""


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


class TaskEdge(NamedTuple):
    """The consumer on batch i comes after the producer on batch i - distance.

    Attributes:
        field: The field that says so.
        value: The field's entry, for messages.
    """

    consumer: Task
    producer: Task
    distance: int
    field: str
    value: str

    @property
    def names(self) -> tuple[str, str]:
        """Of consumer and producer."""
        return self.consumer.name, self.producer.name

    @property
    def lag(self) -> int:
        """Periods from the producer's run to the consumer's."""
        return self.producer.lookahead - self.consumer.lookahead + self.distance

    @property
    def host_only(self) -> bool:
        """Whether the host waits, and no stream."""
        sides = self.consumer.same_progress_sync_sides
        return self.field == "same_progress_sync" and sides is SameProgressSyncSide.CPU


def writers_of(schedule: Schedule) -> dict[str, list[Task]]:
    """Slot name to the tasks that write it."""
    writers: dict[str, list[Task]] = defaultdict(list)
    for task in schedule.all_tasks():
        for name in dict.fromkeys(slot.name for slot in task.writes):
            writers[name].append(task)
    return writers


def named_waits(task: Task) -> Iterator[tuple[str, str, int | None]]:
    """(field, name, distance) of each task that it names; None: whatever batches the two are on."""
    yield from (("depends_on", name, 0) for name in task.depends_on)
    yield from (("cross_iter_depends_on", n, -back) for n, back in task.cross_iter_depends_on)
    yield from (("same_progress_sync", name, None) for name in task.same_progress_sync)


def edges_of(schedule: Schedule) -> list[TaskEdge]:
    """Every dependence whose other side the schedule has; future reads too, except of slots."""
    writers, tasks = writers_of(schedule), schedule.all_tasks()
    by_name = {task.name: task for task in tasks}
    found = []
    for task in tasks:
        for name in dict.fromkeys(slot.name for slot in task.reads if slot.name != BATCH):
            found += [
                TaskEdge(task, writer, 0, "reads", name)
                for writer in writers.get(name, ())
                if writer is not task and writer.lookahead >= task.lookahead
            ]
        for field, name, distance in named_waits(task):
            if (producer := by_name.get(name)) is not None:
                apart = task.lookahead - producer.lookahead if distance is None else distance
                found.append(TaskEdge(task, producer, apart, field, name))
    return found


def between_stages(schedule: Schedule) -> list[tuple[str, str]]:
    """(consumer, producer): each stage's tasks come after those of the stage before it."""
    stages = [stage.tasks for stage in schedule.stages if stage.tasks]
    return [(c.name, p.name) for before, after in pairwise(stages) for c in after for p in before]


def period_order(schedule: Schedule) -> tuple[Task, ...]:
    """The order of the tasks within a period: topological, ties by declaration.

    Raises:
        CycleError: There is none.
    """
    tasks = {task.name: task for task in schedule.all_tasks()}
    rank = {name: (place,) for place, name in enumerate(tasks)}
    edges = [edge.names for edge in edges_of(schedule) if edge.lag == 0]
    return tuple(tasks[name] for name in topological(rank, edges + between_stages(schedule)))


def stream_waits(schedule: Schedule) -> Waits:
    """What each task's stream waits for."""
    waits: dict[str, dict[str, None]] = {}
    for edge in edges_of(schedule):
        if edge.producer.stream != edge.consumer.stream and not edge.host_only:
            waits.setdefault(edge.consumer.name, {})[edge.producer.stream] = None
    return {name: tuple(streams) for name, streams in waits.items()}
