"""What can be refused of a schedule: everything that is wrong, at once, in its own words."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from swpipe.core.dependence import CycleError
from swpipe.core.messages import listed
from swpipe.errors import PlanError, Problem
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import (
    Schedule,
    TaskEdge,
    edges_of,
    named_waits,
    period_order,
    writers_of,
)
from swpipe.schedulable.slot_context import BATCH, DataSlot
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool

_SAID = {
    "none": "it has no tasks: give a Stage at least one",
    "twice": "{count} tasks are named {name!r}: names are unique, rename one",
    "stream": (
        "stream {stream!r} is not in {where} (it has: {there}): add it there, or give the task "
        "another stream"
    ),
    "offset": (
        "{field} has {slot!r}, but its lookahead is {lookahead}: {negative}a task uses the slots "
        "of its own batch. Write {slot.name!r} alone, or batch_offset={lookahead}; for what "
        "another batch left, keep it outside the slots and wait by cross_iter_depends_on"
    ),
    "batch": (
        f"writes {BATCH!r}, which is what the iterator gave: write another slot, such as "
        "'batch_gpu'"
    ),
    "writers": (
        "slot {slot.name!r} of lookahead {slot.batch_offset} is in the writes of {writers}: one "
        "task writes a slot; let the others write slots of other names"
    ),
    "streams": (
        "slot {name!r} is in the writes of {writers}, which are on several streams ({streams}): "
        "write it on one stream, or write slots of other names"
    ),
    "unwritten": (
        "reads {slot!r}, which no task writes: add it to the writes of the task that sets it; "
        f"what the iterator gave is {BATCH!r}"
    ),
    "unknown": (
        "{field} names {name!r}, and the schedule has no such task (it has: {there}): correct the "
        "name, or take it out"
    ),
    "future": (
        "{field} has {entry}, {what} with lookahead {producer.lookahead}; at lookahead "
        "{consumer.lookahead} this is a future read, since {producer.name!r} has not run yet for "
        "the batch{before}. Give {consumer.name!r} lookahead {most} or less, or {producer.name!r} "
        "lookahead {least} or more"
    ),
    "later": (
        "{field} has {value!r}, and {producer!r} is in a later Stage, which runs after it: put "
        "{consumer!r} into the Stage of {producer!r}, or a later one"
    ),
    "cycle": "cyclic dependency: {error}; take out one of: {told}",
}
"""What is wrong, and the mend; of one task, its name comes before."""


class ScheduleValidationError(PlanError):
    """A schedule that cannot be run, with all its problems (seed section 3.2)."""

    what = "the schedule"


class SchedulingError(ScheduleValidationError):
    """Among the problems is a cycle: its tasks would each have to come after the next."""


_FIELDS = (
    (r'cross_iter_deps=\[\("(.+?)", "(.+?)", (\d+)\)\]', r"cross_iter_depends_on=[('\2', -\3)]"),
    (r'same_period_deps=\[\("(.+?)", "(.+?)"\)\]', r"same_progress_sync=['\2']"),
    (r'\bdeps=\[\("(.+?)", "(.+?)"\)\]', r"depends_on=['\2']"),
)
"""An edge of a plan, as a mend names it, and the field of the consumer's ``Task`` that says it."""


@contextmanager
def in_words_of(schedule: Schedule) -> Iterator[None]:
    """Plan errors within the block name fields of tasks and lookaheads, not of the plan."""

    def lookaheads(match: re.Match[str]) -> str:
        numbers = [str(schedule.max_lookahead - int(n)) for n in match.group(1, 2) if n]
        return f"lookahead {' to '.join(numbers)} or {'less' if match[3] == 'later' else 'more'}"

    def told(text: str) -> str:
        for edge, field in _FIELDS:
            text = re.sub(edge, rf"{field} to '\1'", text)
        return re.sub(r"stage (\d+)(?: to (\d+))? or (later|earlier)", lookaheads, text)

    try:
        yield
    except PlanError as error:
        said = [replace(problem, text=told(problem.text)) for problem in error.problems]
        ours = ScheduleValidationError(said, error.grid)
        for note in getattr(error, "__notes__", ()):
            ours.add_note(note)
        raise ours.with_traceback(error.__traceback__) from None


def check_stages(schedule: Schedule, pool: StreamPool, more: Sequence[Problem] = ()) -> None:
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


def validate(schedule: Schedule, stream_pool: StreamPool | None = None) -> None:
    """Refuse a schedule that cannot run, as ``SchedulablePipeline`` does.

    Args:
        schedule: The schedule.
        stream_pool: Its streams; None for those that it names.

    Raises:
        ScheduleValidationError: Lists all that is wrong.
        SchedulingError: The same; there is a cycle.
    """
    named = dict.fromkeys([DEFAULT, *schedule.stream_slots])
    check_stages(schedule, stream_pool or StreamPool(named))


def topological_sort(schedule: Schedule) -> tuple[Task, ...]:
    """The order of the tasks within a period: topological, ties by declaration.

    Raises:
        ScheduleValidationError: As of ``validate``.
    """
    validate(schedule)
    return period_order(schedule)


def _problem(said: str, /, *tasks: str, of: str = "", **values: object) -> Problem:
    """One of the above; ``of`` is the task of which it is said."""
    text = _SAID[said].format(**values)
    return Problem(f"task {of!r}: {text}" if of else text, tasks or ((of,) if of else ()))


def _names(tasks: Collection[Task]) -> Iterator[Problem]:
    if not tasks:
        yield _problem("none")
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            yield _problem("twice", name, count=count, name=name)


def _streams(schedule: Schedule, pool: StreamPool) -> Iterator[Problem]:
    known = {"stream_slots of the schedule": schedule.stream_slots, "the StreamPool": pool.names}
    for task in schedule.all_tasks():
        for where, names in known.items():
            if task.stream not in names:
                there = listed(names)
                yield _problem("stream", of=task.name, stream=task.stream, where=where, there=there)


def _slots(tasks: Collection[Task]) -> Iterator[Problem]:
    writers: dict[DataSlot, list[str]] = defaultdict(list)
    for task in tasks:
        for field in ("reads", "writes"):
            for slot in dict.fromkeys(getattr(task, field)):
                if slot.batch_offset != task.lookahead:
                    negative = "an offset is never negative, and " * (slot.batch_offset < 0)
                    values = {"field": field, "slot": slot, "negative": negative}
                    yield _problem("offset", of=task.name, lookahead=task.lookahead, **values)
                elif field == "writes" and slot.name == BATCH:
                    yield _problem("batch", of=task.name)
                elif field == "writes":
                    writers[slot].append(task.name)
    for slot, names in writers.items():
        if len(names) > 1:
            yield _problem("writers", *names, slot=slot, writers=listed([*map(repr, names)]))
    for name in dict.fromkeys(slot.name for slot in writers):
        found = {t.name: t.stream for t in tasks if name in (slot.name for slot in t.writes)}
        if len(set(found.values())) > 1:
            told = {"writers": listed([*map(repr, found)]), "streams": listed([*found.values()])}
            yield _problem("streams", *found, name=name, **told)


def _reads(schedule: Schedule) -> Iterator[Problem]:
    writers = writers_of(schedule)
    for task in schedule.all_tasks():
        for name in dict.fromkeys(slot.name for slot in task.reads):
            found = writers.get(name, [])
            if name == BATCH or any(w.lookahead >= task.lookahead for w in found):
                continue
            if found:
                nearest = max(found, key=lambda w: w.lookahead)
                yield _future(TaskEdge(task, nearest, 0, "reads", name))
            else:
                yield _problem("unwritten", of=task.name, slot=name)


def _unknown(tasks: Collection[Task]) -> Iterator[Problem]:
    there = sorted({task.name for task in tasks})
    for task in tasks:
        for field, name, _ in named_waits(task):
            if name not in there:
                values = {"field": field, "name": name, "there": listed(there)}
                yield _problem("unknown", of=task.name, **values)


def _future(edge: TaskEdge) -> Problem:
    consumer, producer, distance, field, value = edge
    return _problem(
        "future",
        *edge.names,
        of=consumer.name,
        field=field,
        entry=repr((value, -distance)) if distance else repr(value),
        what=f"which {producer.name!r} writes" if field == "reads" else "which",
        consumer=consumer,
        producer=producer,
        before=f" {distance} batch(es) before" if distance else "",
        most=producer.lookahead + distance,
        least=consumer.lookahead - distance,
    )


def _earlier_stage(schedule: Schedule, edges: Collection[TaskEdge]) -> Iterator[Problem]:
    place = {t.name: n for n, stage in enumerate(schedule.stages) for t in stage.tasks}
    for edge in edges:
        consumer, producer = edge.names
        if edge.lag == 0 and place[consumer] < place[producer]:
            values = {"consumer": consumer, "producer": producer, "value": edge.value}
            yield _problem("later", *edge.names, of=consumer, field=edge.field, **values)


def _cycle(schedule: Schedule, edges: Collection[TaskEdge]) -> Problem | None:
    try:
        period_order(schedule)
    except CycleError as error:
        pairs = [*zip(error.cycle, error.cycle[1:], strict=False)]
        told = [
            f"{e.field} of {e.consumer.name!r} has {e.value!r}"
            for e in edges
            if e.lag == 0 and e.names in pairs
        ]
        return _problem("cycle", *error.cycle, error=error, told="; ".join(told))
    return None
