"""A schedule: the tasks of a loop in stages, their dependences, and the order of a period.

Each wait is a dependence with a distance (``swpipe.core.dependence``). Let L be the largest
lookahead. A task with lookahead k has stage L - k, so that the lag of a dependence is

    lag = lookahead of the producer - lookahead of the consumer + distance

Seed appendix A derives this for ``cross_iter_depends_on``. The seed's engine looks up an event in a
ring, at ``offset = lookahead of the consumer - distance``. Here, an event is kept as long as a
dependence needs it, so that it is never overwritten.
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
"""The other streams that a task's stream waits for, by the task's name."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of tasks; in each period, the tasks of the next stage run after this group.

    Raises:
        TypeError: ``tasks`` is no list of tasks.
    """

    tasks: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _all("tasks", self.tasks, Task, "tasks"))
        for task in self.tasks:
            # ``Task.__init__`` turns names into slots: bare names show that it was not called.
            if not all(isinstance(slot, DataSlot) for slot in (*task.reads, *task.writes)):
                raise TypeError(
                    f"{type(task).__name__}.__init__ does not call super().__init__(), which makes "
                    "it a task"
                )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The stages of a loop, in the order in which they run (seed section 3.2).

    Raises:
        TypeError: ``stages`` is no list of stages, or ``stream_slots`` is no list of names.
    """

    stages: tuple[Stage, ...] = ()
    stream_slots: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", _all("stages", self.stages, Stage, "stages"))
        names = _all("stream_slots", self.stream_slots, str, "names of streams")
        object.__setattr__(self, "stream_slots", names)

    def all_tasks(self) -> tuple[Task, ...]:
        """Return the tasks of all stages, in the order of declaration."""
        return tuple(task for stage in self.stages for task in stage.tasks)

    @property
    def max_lookahead(self) -> int:
        """The largest lookahead; 0 for a schedule without tasks."""
        return max((task.lookahead for task in self.all_tasks()), default=0)

    @property
    def in_flight_batches(self) -> int:
        """The number of batches in flight when the pipeline is full."""
        return self.max_lookahead + 1


def _all(field: str, given: Any, kind: type, what: str) -> tuple[Any, ...]:
    # A string is iterable, but a tuple of its characters is never meant.
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{field} is {shown(given)}: give a tuple of {what}")
    entries = tuple(given)
    for entry in entries:
        if not isinstance(entry, kind):
            raise TypeError(f"{field} has {shown(entry)}: give a tuple of {what}")
    return entries


class TaskEdge(NamedTuple):
    """A dependence: the consumer on batch i comes after the producer on batch i - distance.

    Attributes:
        field: The field of the consumer that declares the dependence.
        value: The entry of the field, for messages.
        sides: The side that waits: host, stream or both.
    """

    consumer: Task
    producer: Task
    distance: int
    field: str
    value: str
    sides: SameProgressSyncSide = SameProgressSyncSide.BOTH

    @property
    def names(self) -> tuple[str, str]:
        """The names of consumer and producer."""
        return self.consumer.name, self.producer.name

    @property
    def lag(self) -> int:
        """The number of periods from the producer's run to the consumer's run."""
        return self.producer.lookahead - self.consumer.lookahead + self.distance

    @property
    def host_only(self) -> bool:
        """Whether only the host waits, and no stream."""
        return self.sides is SameProgressSyncSide.CPU


def writers_of(schedule: Schedule) -> dict[str, list[Task]]:
    """Return the tasks that write each slot, by the slot's name."""
    writers: dict[str, list[Task]] = defaultdict(list)
    for task in schedule.all_tasks():
        for name in dict.fromkeys(slot.name for slot in task.writes):
            writers[name].append(task)
    return writers


class Wait(NamedTuple):
    """A task to wait for; with distance None, the wait is within a period, on any batches."""

    field: str
    task: str
    distance: int | None
    sides: SameProgressSyncSide = SameProgressSyncSide.BOTH


def waits_of(task: Task) -> Iterator[Wait]:
    """Return the waits that a task declares in fields other than ``reads``."""
    for name in task.depends_on:
        yield Wait("depends_on", name, 0)
    for name, offset in task.cross_iter_depends_on:
        # An offset is negative: batches back from the consumer's. A distance is positive.
        yield Wait("cross_iter_depends_on", name, -offset)
    for name, sides in task.same_progress_sync:
        yield Wait("same_progress_sync", name, None, sides)


def edges_of(schedule: Schedule) -> list[TaskEdge]:
    """Return all dependences between tasks of the schedule, except reads of later writers."""
    tasks = schedule.all_tasks()
    writers = writers_of(schedule)
    by_name = {task.name: task for task in tasks}
    edges = []
    for task in tasks:
        # The iterator fills the slot BATCH, so that it needs no wait.
        for name in dict.fromkeys(slot.name for slot in task.reads if slot.name != BATCH):
            edges += [
                TaskEdge(task, writer, 0, "reads", name)
                for writer in writers.get(name, ())
                # A writer with a smaller lookahead runs later on the same batch.
                # ``schedule_rules`` refuses the read unless another writer runs before it.
                if writer is not task and writer.lookahead >= task.lookahead
            ]
        for wait in waits_of(task):
            producer = by_name.get(wait.task)
            # Unknown names are reported by ``schedule_rules``; side NONE makes no dependence.
            if producer is not None and wait.sides:
                distance = wait.distance
                if distance is None:
                    # The distance for which ``TaskEdge.lag`` is 0: both run in the same period.
                    distance = task.lookahead - producer.lookahead
                edges.append(TaskEdge(task, producer, distance, wait.field, wait.task, wait.sides))
    return edges


def between_stages(schedule: Schedule) -> list[tuple[str, str]]:
    """Return (consumer, producer) for each pair of tasks of two consecutive stages."""
    # An empty stage between two others must not break their order.
    stages = [stage.tasks for stage in schedule.stages if stage.tasks]
    return [(c.name, p.name) for before, after in pairwise(stages) for c in after for p in before]


def period_order(schedule: Schedule) -> tuple[Task, ...]:
    """Return the tasks in topological order within a period; declaration order breaks ties.

    Raises:
        CycleError: The dependences within a period form a cycle.
    """
    tasks = {task.name: task for task in schedule.all_tasks()}
    rank = {name: (place,) for place, name in enumerate(tasks)}
    # A dependence with a larger lag is satisfied by an earlier period.
    edges = [edge.names for edge in edges_of(schedule) if edge.lag == 0]
    return tuple(tasks[name] for name in topological(rank, edges + between_stages(schedule)))


def stream_waits(schedule: Schedule) -> Waits:
    """Return the other streams that each task's stream waits for."""
    waits: dict[str, dict[str, None]] = {}
    for edge in edges_of(schedule):
        if edge.producer.stream != edge.consumer.stream and not edge.host_only:
            # A dict as an ordered set: each stream is waited for once, in order of declaration.
            waits.setdefault(edge.consumer.name, {})[edge.producer.stream] = None
    return {name: tuple(streams) for name, streams in waits.items()}
