"""Which task of a schedule waits for which, and the order of a period that follows.

Each way to wait is a dependence with a distance (``swpipe.core.dependence``). A task with lookahead
k has stage L - k, L the largest lookahead, so that the lag of a dependence is

    lag = lookahead of the producer - lookahead of the consumer + distance

which seed appendix A derives for ``cross_iter_depends_on``. The engine of the seed looks an event
up in the slot ``offset = lookahead of the consumer - distance``; here events are kept as long as a
dependence may ask for them, so that none has rotated out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from swpipe.core.dependence import topological
from swpipe.schedulable.data_slot import BATCH
from swpipe.schedulable.declared_task import SameProgressSyncSide, Task
from swpipe.schedulable.schedule import Schedule


class Edge(NamedTuple):
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


def edges_of(schedule: Schedule) -> list[Edge]:
    """Every dependence whose other side the schedule has; future reads too, except of slots."""
    writers = writers_of(schedule)
    by_name = {task.name: task for task in schedule.all_tasks()}
    return [
        edge
        for task in schedule.all_tasks()
        for edge in (*_reads(task, writers), *_waits(task, by_name))
    ]


def _reads(task: Task, writers: Mapping[str, list[Task]]) -> Iterator[Edge]:
    for name in dict.fromkeys(slot.name for slot in task.reads if slot.name != BATCH):
        for writer in writers.get(name, ()):
            if writer is not task and writer.lookahead >= task.lookahead:
                yield Edge(task, writer, 0, "reads", name)


def _waits(task: Task, by_name: Mapping[str, Task]) -> Iterator[Edge]:
    for name in task.depends_on:
        if name in by_name:
            yield Edge(task, by_name[name], 0, "depends_on", name)
    for name, offset in task.cross_iter_depends_on:
        if name in by_name:
            yield Edge(task, by_name[name], -offset, "cross_iter_depends_on", name)
    for name in task.same_progress_sync:
        if name in by_name:
            producer = by_name[name]
            distance = task.lookahead - producer.lookahead
            yield Edge(task, producer, distance, "same_progress_sync", name)


def between_stages(schedule: Schedule) -> list[tuple[Task, Task]]:
    """(consumer, producer): each stage's tasks come after those of the stage before it."""
    stages = [stage.tasks for stage in schedule.stages if stage.tasks]
    return [(c, p) for before, after in pairwise(stages) for c in after for p in before]


def period_order(schedule: Schedule) -> tuple[Task, ...]:
    """The order of the tasks within a period: topological, ties by declaration.

    Raises:
        CycleError: There is none.
    """
    tasks = {task.name: task for task in schedule.all_tasks()}
    rank = {name: (place,) for place, name in enumerate(tasks)}
    edges = [(e.consumer.name, e.producer.name) for e in edges_of(schedule) if e.lag == 0]
    edges += [(c.name, p.name) for c, p in between_stages(schedule)]
    return tuple(tasks[name] for name in topological(rank, edges))
