"""Wrong schedules and tasks, and the error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swpipe.errors import PlanError
from swpipe.schedulable import (
    DataSlot,
    Pipeline,
    SchedulablePipeline,
    Schedule,
    ScheduleValidationError,
    SchedulingError,
    Stage,
    StreamPool,
    Task,
    TaskContext,
    ThreadedExecutor,
    topological_sort,
    validate,
)
from tests.schedulable.work import one_stage, pool


def task(name: str, **fields: Any) -> Task:
    """Return a task that does nothing."""
    return Task.from_fn(name, lambda ctx: None, **fields)


def two_stages(first: Task, then: Task) -> Schedule:
    return Schedule((Stage((first,)), Stage((then,))))


REFUSED: dict[str, tuple[Schedule, str]] = {
    "no tasks": (Schedule(), "it has no tasks"),
    "names": (one_stage(task("a"), task("a")), "2 tasks are named 'a': names are unique"),
    "a stream that the schedule lacks": (
        one_stage(task("a", stream="side")),
        "task 'a': stream 'side' is not in stream_slots of the schedule (it has: default)",
    ),
    "a stream that the pool lacks": (
        one_stage(task("a", stream="x"), streams=("default", "x")),
        "task 'a': stream 'x' is not in the StreamPool (it has: default, side)",
    ),
    "two writers": (
        one_stage(task("a", writes=["s"]), task("b", writes=["s"])),
        "slot 's' of lookahead 0 is in the writes of 'a', 'b': one task writes a slot",
    ),
    "writers on two streams": (
        one_stage(
            task("a", lookahead=1, writes=["s"]),
            task("b", writes=["s"], stream="side"),
            streams=("default", "side"),
        ),
        "slot 's' is in the writes of 'a', 'b', which are on several streams (default, side)",
    ),
    "no writer": (one_stage(task("a", reads=["s"])), "task 'a': reads 's', which no task writes"),
    "a written batch": (
        one_stage(task("a", writes=["batch_cpu"])),
        "task 'a': writes 'batch_cpu', which is what the iterator gave",
    ),
    "another batch's slot": (
        one_stage(task("a", lookahead=1, writes=["s"]), task("b", reads=[DataSlot("s", 1)])),
        "task 'b': reads has DataSlot(name='s', batch_offset=1), but its lookahead is 0",
    ),
    "a negative offset": (
        one_stage(task("a", writes=[DataSlot("s", -1)])),
        "an offset is never negative",
    ),
    "an unknown task": (
        one_stage(task("a", depends_on=["b"])),
        "task 'a': depends_on names 'b', and the schedule has no such task (it has: a)",
    ),
    "a later stage": (
        two_stages(task("r", reads=["s"]), task("w", writes=["s"])),
        "take out one of: reads of 'r' has 's'; or put the tasks into one Stage",
    ),
    "a later stage, by name": (
        two_stages(task("r", same_progress_sync=["w"]), task("w", lookahead=1)),
        "take out one of: same_progress_sync of 'r' has 'w'; or put the tasks into one Stage",
    ),
    "a cycle": (
        one_stage(
            task("a", same_progress_sync=["b"]),
            task("b", lookahead=1, cross_iter_depends_on=["c"]),
            task("c", reads=["x"]),
            task("d", depends_on=["a"], writes=["x"]),
        ),
        "cyclic dependency: 'a' after 'b' after 'c' after 'd' after 'a'",
    ),
    "itself": (one_stage(task("a", depends_on=["a"])), "cyclic dependency: 'a' after 'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_schedule_is_refused_in_its_own_words(case: str) -> None:
    """A PlanError names task, field, value and fix, and no stage by number."""
    schedule, text = REFUSED[case]
    with pytest.raises(ScheduleValidationError) as refused:
        SchedulablePipeline(schedule, pool("side"))
    (problem,) = refused.value.problems
    assert text in problem.text
    assert ": " in problem.text
    assert isinstance(refused.value, PlanError)
    assert str(refused.value).startswith("the schedule cannot run: one problem\n")
    assert isinstance(refused.value, SchedulingError) == ("cyclic" in problem.text)
    assert "stage 0" not in str(refused.value)
    with pytest.raises(ScheduleValidationError) as alone:
        validate(schedule, pool("side"))
    assert str(alone.value) == str(refused.value)


def test_a_stream_has_a_name_that_can_be_shown() -> None:
    """The plan refuses another name, in words of the schedule."""
    schedule = one_stage(task("a", stream="\n"), streams=("default", "\n"))
    with pytest.raises(ScheduleValidationError, match="names have 1 to"):
        SchedulablePipeline(schedule, pool("\n"))


def test_a_schedule_has_an_order_before_there_is_a_pipeline() -> None:
    """It is that of a period, with the schedule's streams; or the schedule is refused."""
    tasks = task("late", reads=["x"]), task("early", writes=["x"], stream="side")
    found = topological_sort(one_stage(*tasks, streams=("default", "side")))
    assert [one.name for one in found] == ["early", "late"]
    with pytest.raises(SchedulingError) as refused:
        topological_sort(REFUSED["a cycle"][0])
    assert (  # each field of the cycle's tasks that makes it
        "take out one of: same_progress_sync of 'a' has 'b'; cross_iter_depends_on of 'b' has 'c'; "
        "reads of 'c' has 'x'; depends_on of 'd' has 'a'"
    ) in str(refused.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    """This includes the cycle, which makes it a SchedulingError."""
    tasks = (
        task("a", stream="x", reads=["nothing"], depends_on=["b"]),
        task("b", depends_on=["a"], writes=["batch_cpu"]),
        task("c", lookahead=1, depends_on=["b"], same_progress_sync=["nobody"]),
    )
    with pytest.raises(SchedulingError) as refused:
        SchedulablePipeline(
            one_stage(*tasks),
            pool(),
            executor=ThreadedExecutor({"d": "io", "a": 3}),  # type: ignore[dict-item]
        )
    assert len(refused.value.problems) == 9


@pytest.mark.parametrize(
    ("thread_map", "most", "text"),
    [
        ({"b": "io"}, None, "thread_map names task 'b', which the schedule does not have"),
        (lambda task: None, None, "thread_map gives task 'a' thread None: names have"),
        ("per_task", 1, "max_workers is 1, but thread_map names 2 threads besides the caller's"),
    ],
)
def test_a_thread_map_must_fit_the_schedule(thread_map: Any, most: int | None, text: str) -> None:
    """Its names and its number of threads are checked."""
    executor = ThreadedExecutor(thread_map, most)
    with pytest.raises(ScheduleValidationError, match=text):
        SchedulablePipeline(one_stage(task("a"), task("c")), pool(), executor=executor)


class Wrong(Task):
    """A task without ``run``."""


class Silent(Task):
    """A task whose ``__init__`` does not call its base class."""

    reads = ("x",)

    def __init__(self) -> None:
        pass

    def run(self, ctx: Any) -> None:
        """Do nothing."""


async def later(ctx: Any) -> None:
    """Do nothing, asynchronously."""


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Task(), ValueError, "a task needs a name"),
        (lambda: task(""), ValueError, "a task needs a name"),
        (lambda: task("<a>"), ValueError, "names have 1 to"),
        (lambda: task(3), TypeError, "a task's name is a string, not 3"),  # type: ignore[arg-type]
        (lambda: task("a", lookahead=-1), ValueError, "task 'a': lookahead is -1: give 0"),
        (lambda: task("a", lookahead=1000), ValueError, "lookahead is 1000: give 0 .* up to 999"),
        (lambda: task("a", lookahead=True), TypeError, "lookahead is True: give an integer"),
        (lambda: task("a", stream=3), TypeError, "stream is 3: give a string"),
        (lambda: task("a", reads=3), TypeError, "reads is 3: give a tuple"),
        (lambda: task("a", lookahed=3), TypeError, "unknown fields lookahed: they are stream,"),
        (lambda: task("a", same_progress_sync_sides=4), ValueError, "is 4, which has unknown bits"),
        (lambda: task("a", same_progress_sync_sides=-1), ValueError, "is -1, which has unknown"),
        (lambda: task("a", reads=[3]), TypeError, "reads has 3: give slots or their names"),
        (lambda: task("a", depends_on=[3]), TypeError, "depends_on has 3: give names of tasks"),
        (lambda: task("a", io=[3]), TypeError, "io has 3: give DeclaredIOs"),
        (
            lambda: task("a", cross_iter_depends_on=[("b", 0)]),
            ValueError,
            r"cross_iter_depends_on has \('b', 0\): offsets are -1",
        ),
        (lambda: task("a", cross_iter_depends_on=[("b", -1001)]), ValueError, "down to -1000"),
        (lambda: task("a", cross_iter_depends_on=[("b", "c")]), TypeError, "or .name, -batches"),
        (
            lambda: task("a", depends_on=["b"], cross_iter_depends_on=[("b", -2)]),
            ValueError,
            "'b' is in depends_on and in cross_iter_depends_on",
        ),
        (
            lambda: task("a", depends_on=["b"], same_progress_sync=["b"]),
            ValueError,
            "keep one of them",
        ),
        (lambda: Wrong("a"), TypeError, r"task 'a' does nothing: define run\(ctx\)"),
        (lambda: Task.from_fn("a", 3), TypeError, "fn must be callable"),  # type: ignore[arg-type]
        (lambda: Task.from_fn("a", later), TypeError, "fn is asynchronous"),
        (lambda: Stage((Silent(),)), TypeError, r"Silent.__init__ does not call super"),
        (lambda: Schedule((task("a"),)), TypeError, "stages has"),  # type: ignore[arg-type]
        (lambda: Schedule((), "default"), TypeError, "stream_slots is 'default'"),  # type: ignore[arg-type]
        (lambda: DataSlot(3), TypeError, "a slot's name is a string"),  # type: ignore[arg-type]
        (lambda: DataSlot("x", "1"), TypeError, "batch_offset is '1'"),  # type: ignore[arg-type]
        (lambda: StreamPool({}), ValueError, 'no stream "default"'),
        (lambda: StreamPool({"default": 3}), TypeError, "give a torch.Stream, or None"),  # type: ignore[dict-item]
        (lambda: StreamPool(["default"]), TypeError, "give a dict"),  # type: ignore[arg-type]
        (lambda: pool().get("x"), KeyError, "the pool has no stream 'x'"),
        (lambda: DataSlot(""), ValueError, "a slot needs a name"),
        (lambda: StreamPool({3: None}), TypeError, "a stream is named 3"),  # type: ignore[dict-item]
        (lambda: ThreadedExecutor(3), TypeError, "thread_map is 3"),  # type: ignore[arg-type]
        (lambda: ThreadedExecutor(max_workers="1"), TypeError, "max_workers is '1'"),  # type: ignore[arg-type]
        (lambda: ThreadedExecutor("x"), ValueError, "thread_map is 'x'"),  # type: ignore[arg-type]
        (lambda: ThreadedExecutor(max_workers=0), ValueError, "max_workers is 0"),
        (lambda: SchedulablePipeline([], pool()), TypeError, "give a Schedule"),  # type: ignore[arg-type]
        (lambda: Pipeline([task("a")], {}), TypeError, "give a StreamPool"),  # type: ignore[arg-type]
        (lambda: Pipeline([3], pool()), TypeError, "tasks has 3"),  # type: ignore[list-item]
    ],
)
def test_what_is_wrong_by_itself_fails_where_it_is_made(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    """ValueError for a wrong value, TypeError for one of the wrong kind."""
    with pytest.raises(error, match=text):
        make()


def test_a_task_does_not_change_once_it_is_made() -> None:
    """Its lookahead and all other declarations are fixed; other attributes may change."""
    one = task("a")
    with pytest.raises(AttributeError, match="task 'a': lookahead is read-only"):
        one.lookahead = 2
    one.note = "mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "lookahead", "told"),
    [
        ({}, 0, "add depends_on=['fill'] to 'use'"),
        (
            {"same_progress_sync": ["fill"]},
            1,
            "to add cross_iter_depends_on=[('use', -1)] to 'fill'",
        ),
        ({}, 2, "from lookahead 2 to 1 or less"),
    ],
)
def test_what_is_seen_while_it_runs_is_told_in_words_of_schedules(
    fields: dict[str, Any], lookahead: int, told: str
) -> None:
    """They are fields of tasks and lookaheads, and none of a plan's."""
    total = torch.zeros(2)

    def fill(ctx: TaskContext) -> None:
        total.add_(ctx.slots["batch_cpu"])

    def use(ctx: TaskContext) -> None:
        ctx.slots.set("step_result", total.sum().item())

    first = Task.from_fn("fill", fill, lookahead=lookahead, stream="side", reads=["batch_cpu"])
    then = Task.from_fn("use", use, writes=["step_result"], **fields)
    schedule = one_stage(first, then, streams=("default", "side"))
    with SchedulablePipeline(schedule, pool("side"), executor="threaded") as pipe:
        with pytest.raises(ScheduleValidationError) as caught:
            pipe.progress(iter(range(1, 4)))
    assert told in str(caught.value)
    assert not re.search(r"\bdeps=|_deps=|to stage|stage \d", caught.value.in_one_line)
    with SchedulablePipeline(
        schedule, pool("side"), executor="threaded", check_effects=False
    ) as pipe:  # it is meant
        pipe.progress(iter(range(1, 4)))
