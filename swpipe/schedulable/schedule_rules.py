"""What can be refused of a schedule: everything that is wrong, at once, in its own words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from swpipe.core.dependence import CycleError
from swpipe.core.messages import listed
from swpipe.errors import PlanError, Problem
from swpipe.schedulable.data_slot import BATCH, DataSlot
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import Schedule
from swpipe.schedulable.schedule_edges import Edge, edges_of, period_order, writers_of
from swpipe.schedulable.stream_pool import StreamPool


class ScheduleValidationError(PlanError):
    """A schedule that cannot be run, with all its problems (seed section 3.2)."""

    what = "the schedule"


class SchedulingError(ScheduleValidationError):
    """Among the problems is a cycle: its tasks would each have to come after the next."""


def check_schedule(schedule: Schedule, pool: StreamPool, more: Sequence[Problem] = ()) -> None:
    """Refuse a schedule that cannot run.

    Args:
        schedule: The schedule.
        pool: Its streams.
        more: Further problems that are known.

    Raises:
        ScheduleValidationError: Lists all that is wrong.
        SchedulingError: The same; there is a cycle.
    """
    tasks = schedule.all_tasks()
    problems = [*_names(tasks), *_streams(schedule, pool), *_slots(tasks), *_reads(schedule)]
    problems += [*_unknown(tasks), *more]
    cycle = None
    if len({task.name for task in tasks}) == len(tasks):  # edges need to know which task is meant
        edges = edges_of(schedule)
        problems += [_future(edge) for edge in edges if edge.lag < 0]
        earlier = [*_earlier_stage(schedule, edges)]
        problems += earlier
        cycle = None if earlier else _cycle(schedule, edges)
    if cycle is not None:
        raise SchedulingError([*problems, cycle])
    if problems:
        raise ScheduleValidationError(problems)


def _names(tasks: Collection[Task]) -> Iterator[Problem]:
    if not tasks:
        yield Problem("it has no tasks: give a Stage at least one")
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            yield Problem(
                f"{count} tasks are named {name!r}: names are unique, rename one", (name,)
            )


def _streams(schedule: Schedule, pool: StreamPool) -> Iterator[Problem]:
    for task in schedule.all_tasks():
        mend = "add it there, or give the task another stream"
        for where, names in (
            ("stream_slots of the schedule", schedule.stream_slots),
            ("the StreamPool", pool.names),
        ):
            if task.stream not in names:
                yield Problem(
                    f"task {task.name!r}: stream {task.stream!r} is not in {where} "
                    f"(it has: {listed(names)}): {mend}",
                    (task.name,),
                )


def _slots(tasks: Collection[Task]) -> Iterator[Problem]:
    writers: dict[DataSlot, list[str]] = defaultdict(list)
    for task in tasks:
        for field in ("reads", "writes"):
            for slot in dict.fromkeys(getattr(task, field)):
                if slot.batch_offset != task.lookahead:
                    yield _wrong_offset(task, field, slot)
                elif field == "writes" and slot.name == BATCH:
                    yield Problem(
                        f"task {task.name!r}: writes {BATCH!r}, which is what the iterator gave: "
                        "write another slot, such as 'batch_gpu'",
                        (task.name,),
                    )
                elif field == "writes":
                    writers[slot].append(task.name)
    for slot, names in writers.items():
        if len(names) > 1:
            yield Problem(
                f"slot {slot.name!r} of lookahead {slot.batch_offset} is in the writes of "
                f"{listed([*map(repr, names)])}: one task writes a slot; let the others write "
                "slots of other names",
                tuple(names),
            )


def _wrong_offset(task: Task, field: str, slot: DataSlot) -> Problem:
    negative = "an offset is never negative, and " if slot.batch_offset < 0 else ""
    return Problem(
        f"task {task.name!r}: {field} has {slot!r}, but its lookahead is {task.lookahead}: "
        f"{negative}a task uses the slots of its own batch. Write {slot.name!r} alone, or "
        f"batch_offset={task.lookahead}; for what another batch left, keep it outside the slots "
        "and wait by cross_iter_depends_on",
        (task.name,),
    )


def _reads(schedule: Schedule) -> Iterator[Problem]:
    writers = writers_of(schedule)
    for task in schedule.all_tasks():
        for name in dict.fromkeys(slot.name for slot in task.reads):
            found = writers.get(name, [])
            if name == BATCH or any(w.lookahead >= task.lookahead for w in found):
                continue
            if not found:
                yield Problem(
                    f"task {task.name!r}: reads {name!r}, which no task writes: add it to the "
                    f"writes of the task that sets it; what the iterator gave is {BATCH!r}",
                    (task.name,),
                )
            else:
                yield _not_yet(task, max(found, key=lambda w: w.lookahead), "reads", name, 0)


def _unknown(tasks: Collection[Task]) -> Iterator[Problem]:
    known = {task.name for task in tasks}
    for task in tasks:
        for field, names in (
            ("depends_on", task.depends_on),
            ("cross_iter_depends_on", [name for name, _ in task.cross_iter_depends_on]),
            ("same_progress_sync", task.same_progress_sync),
        ):
            for name in names:
                if name not in known:
                    yield Problem(
                        f"task {task.name!r}: {field} names {name!r}, and the schedule has no such "
                        f"task (it has: {listed(sorted(known))}): correct the name, or take it out",
                        (task.name,),
                    )


def _future(edge: Edge) -> Problem:
    return _not_yet(edge.consumer, edge.producer, edge.field, edge.value, edge.distance)


def _not_yet(consumer: Task, producer: Task, field: str, value: str, distance: int) -> Problem:
    most = producer.lookahead + distance
    entry = repr((value, -distance)) if distance else repr(value)
    what = f"which {producer.name!r} writes" if field == "reads" else "which"
    before = f" {distance} batch(es) before" if distance else ""
    return Problem(
        f"task {consumer.name!r}: {field} has {entry}, {what} with lookahead {producer.lookahead}; "
        f"at lookahead {consumer.lookahead} this is a future read, since {producer.name!r} has not "
        f"run yet for the batch{before}. Give {consumer.name!r} lookahead {most} or less, or "
        f"{producer.name!r} lookahead {consumer.lookahead - distance} or more",
        (consumer.name, producer.name),
    )


def _earlier_stage(schedule: Schedule, edges: Collection[Edge]) -> Iterator[Problem]:
    place = {t.name: n for n, stage in enumerate(schedule.stages) for t in stage.tasks}
    for consumer, producer, _, field, value in (edge for edge in edges if edge.lag == 0):
        if place[consumer.name] < place[producer.name]:
            yield Problem(
                f"task {consumer.name!r}: {field} has {value!r}, and {producer.name!r} is in a "
                f"later Stage, which runs after it: put {consumer.name!r} into the Stage of "
                f"{producer.name!r}, or a later one",
                (consumer.name, producer.name),
            )


def _cycle(schedule: Schedule, edges: Collection[Edge]) -> Problem | None:
    try:
        period_order(schedule)
    except CycleError as error:
        pairs = [*zip(error.cycle, error.cycle[1:], strict=False)]
        told = [
            f"{e.field} of {e.consumer.name!r} has {e.value!r}"
            for e in edges
            if e.lag == 0 and (e.consumer.name, e.producer.name) in pairs
        ]
        text = f"cyclic dependency: {error}; take out one of: {'; '.join(told)}"
        return Problem(text, error.cycle)
    return None
