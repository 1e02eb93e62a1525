"""The rules of a schedule; all violations are reported at once, in terms of the schedule.

check_stages   _names, _streams, _slots, _reads, _references   on the tasks as declared
               edges_of ──> future reads
               period_order ──> a cycle, also with the order of the stages
in_words_of    problems of the translated plan: the edges and stages that a problem names
               (``Problem.terms``) are replaced by fields and lookaheads
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from swpipe.core.dependence import CycleError, ProposedEdge, ProposedStage
from swpipe.core.messages import listed
from swpipe.errors import PlanError, Problem
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import (
    Schedule,
    TaskEdge,
    between_stages,
    edges_of,
    period_order,
    waits_of,
    writers_of,
)
from swpipe.schedulable.slot_context import BATCH, DataSlot
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool


class ScheduleValidationError(PlanError):
    """The error of a schedule that cannot run; it lists all problems (seed section 3.2)."""

    what = "the schedule"


class SchedulingError(ScheduleValidationError):
    """The error of a schedule whose dependences within a period form a cycle."""


def check_stages(schedule: Schedule, pool: StreamPool, more: Sequence[Problem] = ()) -> None:
    """Refuse a schedule that cannot run.

    Args:
        schedule: The schedule.
        pool: The streams of the schedule.
        more: Problems that the caller has found, to be reported as well.

    Raises:
        ScheduleValidationError: The schedule has problems; the error lists all of them.
        SchedulingError: One of the problems is a cycle.
    """
    tasks = schedule.all_tasks()
    problems = [*_names(tasks), *_streams(schedule, pool), *_slots(tasks), *_reads(schedule)]
    problems += [*_references(tasks), *more]
    cycle: Problem | None = None
    if len({task.name for task in tasks}) == len(tasks):  # edges find their tasks by name
        edges = edges_of(schedule)
        problems += [_future_read(edge) for edge in edges if edge.lag < 0]
        cycle = _cycle(schedule, edges)
    # The cycle comes last: the other problems are often its cause.
    if cycle is not None:
        raise SchedulingError([*problems, cycle])
    if problems:
        raise ScheduleValidationError(problems)


def validate(schedule: Schedule, stream_pool: StreamPool | None = None) -> None:
    """Refuse a schedule that cannot run, as ``SchedulablePipeline`` does.

    Args:
        schedule: The schedule.
        stream_pool: The streams of the schedule; None for a pool with the names in its
            ``stream_slots``.

    Raises:
        ScheduleValidationError: The schedule has problems; the error lists all of them.
        SchedulingError: One of the problems is a cycle.
    """
    named = dict.fromkeys([DEFAULT, *schedule.stream_slots])
    check_stages(schedule, stream_pool or StreamPool(named))


def topological_sort(schedule: Schedule) -> tuple[Task, ...]:
    """Return the tasks in topological order within a period; declaration order breaks ties.

    Raises:
        ScheduleValidationError: See ``validate``.
    """
    validate(schedule)
    return period_order(schedule)


@contextmanager
def in_words_of(schedule: Schedule) -> Iterator[None]:
    """Re-raise plan errors of a block with fields and lookaheads instead of edges and stages."""
    try:
        yield
    except PlanError as error:
        problems = [_in_words(problem, schedule.max_lookahead) for problem in error.problems]
        ours = ScheduleValidationError(problems, error.grid)
        # A new exception starts without the notes of the old one.
        for note in getattr(error, "__notes__", ()):
            ours.add_note(note)
        # ``from None``: the original error says the same in terms that the user has not written.
        raise ours.with_traceback(error.__traceback__) from None


def _in_words(problem: Problem, most: int) -> Problem:
    """Replace the terms of a plan in a problem's text; ``most`` is the largest lookahead."""
    text = problem.text
    for term in problem.terms:
        text = text.replace(str(term), _words(term, most))
    return replace(problem, text=text)


def _words(term: ProposedEdge | ProposedStage, most: int) -> str:
    match term:
        # Stage s is lookahead most - s, so a later stage is a smaller lookahead.
        case ProposedStage(stage, bound, now):
            start = "" if now is None else f"{most - now} to "
            return f"lookahead {start}{most - stage} or {'less' if bound == 'later' else 'more'}"
        case ProposedEdge(consumer, producer, 0):
            field = f"depends_on=[{producer!r}]"
        case ProposedEdge(consumer, producer, distance):
            field = f"cross_iter_depends_on=[({producer!r}, -{distance})]"
    return f"{field} to {consumer!r}"


def _problem(task: Task, text: str, *others: str) -> Problem:
    return Problem(f"task {task.name!r}: {text}", (task.name, *others))


def _names(tasks: Collection[Task]) -> Iterator[Problem]:
    if not tasks:
        yield Problem("it has no tasks: give a Stage at least one")
    # Each repeated name is one problem, however many tasks have it.
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            text = f"{count} tasks are named {name!r}: names are unique, rename one"
            yield Problem(text, (name,))


def _streams(schedule: Schedule, pool: StreamPool) -> Iterator[Problem]:
    # A stream has to be in both: the schedule can be validated without a pool.
    known = {"stream_slots of the schedule": schedule.stream_slots, "the StreamPool": pool.names}
    for task in schedule.all_tasks():
        for place, names in known.items():
            if task.stream not in names:
                yield _problem(
                    task,
                    f"stream {task.stream!r} is not in {place} (it has: {listed(names)}): add it "
                    "there, or give the task another stream",
                )


def _slots(tasks: Collection[Task]) -> Iterator[Problem]:
    # By slot with its offset: tasks of different lookaheads may write slots of the same name, since
    # they run on the same batch in different periods.
    writers: dict[DataSlot, list[Task]] = defaultdict(list)
    for task in tasks:
        for field in ("reads", "writes"):
            for slot in dict.fromkeys(getattr(task, field)):
                if slot.batch_offset != task.lookahead:
                    # The product is an empty string unless the offset is negative.
                    negative = "an offset is never negative, and " * (slot.batch_offset < 0)
                    yield _problem(
                        task,
                        f"{field} has {slot!r}, but its lookahead is {task.lookahead}: {negative}a "
                        f"task uses the slots of its own batch. Write {slot.name!r} alone, or "
                        f"batch_offset={task.lookahead}; for what another batch left, keep it "
                        "outside the slots and wait by cross_iter_depends_on",
                    )
                elif field == "writes" and slot.name == BATCH:
                    yield _problem(
                        task,
                        f"writes {BATCH!r}, which is what the iterator gave: write another slot, "
                        "such as 'batch_gpu'",
                    )
                elif field == "writes":
                    writers[slot].append(task)
    for slot, several in writers.items():
        if len(several) > 1:
            yield _writers(
                f"slot {slot.name!r} of lookahead {slot.batch_offset}",
                several,
                ": one task writes a slot; let the others write slots of other names",
            )
    # A reader waits for all writers of a name; on several streams, which value is the last would
    # depend on timing.
    for name in dict.fromkeys(slot.name for slot in writers):
        several = [task for slot, of in writers.items() if slot.name == name for task in of]
        streams = [task.stream for task in several]
        if len(set(streams)) > 1:
            yield _writers(
                f"slot {name!r}",
                several,
                f", which are on several streams ({listed(streams)}): write it on one stream, or "
                "write slots of other names",
            )


def _writers(slot: str, tasks: Sequence[Task], rule: str) -> Problem:
    names = [task.name for task in tasks]
    return Problem(f"{slot} is in the writes of {listed([*map(repr, names)])}{rule}", tuple(names))


def _reads(schedule: Schedule) -> Iterator[Problem]:
    writers = writers_of(schedule)
    for task in schedule.all_tasks():
        for name in dict.fromkeys(slot.name for slot in task.reads):
            of = writers.get(name, [])
            # The writer with the largest lookahead is the first to run on a batch. If even this one
            # runs after the reader, nothing has filled the slot.
            nearest = max(of, key=lambda writer: writer.lookahead, default=None)
            if name == BATCH:
                continue
            if nearest is None:
                yield _problem(
                    task,
                    f"reads {name!r}, which no task writes: add it to the writes of the task that "
                    f"sets it; what the iterator gave is {BATCH!r}",
                )
            elif nearest.lookahead < task.lookahead:
                yield _future_read(TaskEdge(task, nearest, 0, "reads", name))


def _references(tasks: Collection[Task]) -> Iterator[Problem]:
    names = sorted({task.name for task in tasks})
    for task in tasks:
        for wait in waits_of(task):
            if wait.task not in names:
                yield _problem(
                    task,
                    f"{wait.field} names {wait.task!r}, and the schedule has no such task (it has: "
                    f"{listed(names)}): correct the name, or take it out",
                )


def _future_read(edge: TaskEdge) -> Problem:
    consumer = edge.consumer
    producer = edge.producer
    # The entry as the user has written it: offsets are negative distances.
    entry = (edge.value, -edge.distance) if edge.distance else edge.value
    which = f"which {producer.name!r} writes" if edge.field == "reads" else "which"
    before = f" {edge.distance} batch(es) before" if edge.distance else ""
    return _problem(
        consumer,
        f"{edge.field} has {entry!r}, {which} with lookahead {producer.lookahead}; at lookahead "
        f"{consumer.lookahead} this is a future read, since {producer.name!r} has not run yet for "
        f"the batch{before}. Give {consumer.name!r} lookahead "
        f"{producer.lookahead + edge.distance} or less, or {producer.name!r} lookahead "
        f"{consumer.lookahead - edge.distance} or more",
        producer.name,
    )


def _cycle(schedule: Schedule, edges: Collection[TaskEdge]) -> Problem | None:
    try:
        period_order(schedule)
    except CycleError as error:
        # The cycle's edges without those of the stages, which the user has not declared one by one.
        pairs = set(pairwise(error.cycle))
        causes = [
            f"{edge.field} of {edge.consumer.name!r} has {edge.value!r}"
            for edge in edges
            if edge.lag == 0 and edge.names in pairs
        ]
        text = f"cyclic dependency: {error}; take out one of: {'; '.join(causes)}"
        if not pairs.isdisjoint(between_stages(schedule)):
            text += "; or put the tasks into one Stage, since each comes after the one before it"
        return Problem(text, error.cycle)
    return None
