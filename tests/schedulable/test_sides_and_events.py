"""The sides that wait for a task in the same period, and events that tasks record themselves."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe import PipelinePlan
from swpipe.schedulable import (
    SameProgressSyncSide,
    SchedulablePipeline,
    ScheduleValidationError,
    Task,
    TaskContext,
    topological_sort,
)
from tests.device.virtual import VirtualDevice
from tests.schedulable.work import Log, one_stage, pool, results

NONE, CPU, GPU, BOTH = (
    SameProgressSyncSide.NONE,
    SameProgressSyncSide.CPU,
    SameProgressSyncSide.GPU,
    SameProgressSyncSide.BOTH,
)


def consumer(sync: Any, **fields: Any) -> Task:
    """Return a task with this wait for another one."""
    return Task.from_fn("c", print, same_progress_sync=sync, **fields)


@pytest.mark.parametrize(
    ("sync", "edges"),
    [
        ("p", [("p", BOTH)]),
        (("p", "q"), [("p", BOTH), ("q", BOTH)]),
        ((("p", GPU),), [("p", GPU)]),
        ([("p", CPU), ["q", "gpu"], "r"], [("p", CPU), ("q", GPU), ("r", BOTH)]),
        ({"task": "p", "sides": 1}, [("p", CPU)]),
        (({"task": "p"}, {"task": "q", "sides": "none"}), [("p", BOTH), ("q", NONE)]),
    ],
)
def test_an_entry_is_a_name_a_pair_or_a_mapping(sync: Any, edges: list[Any]) -> None:
    """Each has its own side, which may be a name; all become one form."""
    task = consumer(sync)
    assert task.same_progress_sync == tuple(edges)
    assert consumer(task.same_progress_sync).same_progress_sync == tuple(edges)


def test_the_tasks_side_is_that_of_the_entries_without_one() -> None:
    """This holds for an entry that is a mapping, too."""
    task = consumer(("p", ("q", GPU), {"task": "r"}), same_progress_sync_sides=CPU)
    assert task.same_progress_sync == (("p", CPU), ("q", GPU), ("r", CPU))


@pytest.mark.parametrize(
    ("sync", "error", "text"),
    [
        ((("p", 4),), ValueError, "the side is 4, which has unknown bits or is no side"),
        ((("p", "both sides"),), ValueError, "the side is 'both sides'"),
        ((("p", None),), ValueError, "the side is None"),
        ((("p", 1, 2),), TypeError, r"same_progress_sync has \('p', 1, 2\): give names of tasks"),
        ({"name": "p"}, TypeError, r"\{'task': name, 'sides': side\}"),
        ({"task": "p", "side": 1}, TypeError, r"\{'task': name, 'sides': side\}"),
        (3, TypeError, "same_progress_sync is 3: give a tuple"),
    ],
)
def test_other_entries_are_refused(sync: Any, error: type[Exception], text: str) -> None:
    """The error has the task's name, the value and the possible forms."""
    with pytest.raises(error, match=f"task 'c': same_progress_sync.*{text}|{text}"):
        consumer(sync)


def plan_of(sync: Any, **fields: Any) -> PipelinePlan:
    """Return the plan of a task with this wait for ``p`` and ``q``, which are on other streams."""
    log = Log()
    tasks = (
        log.task("c", same_progress_sync=sync, **fields),
        log.task("p", lookahead=1, stream="side", writes=["x"]),
        log.task("q", stream="third"),
    )
    streams = ("default", "side", "third")
    with SchedulablePipeline(one_stage(*tasks, streams=streams), pool(*streams[1:])) as pipe:
        list(results(pipe, range(4)))
        return pipe.plan


def test_each_edge_has_its_side_in_the_plan() -> None:
    """HOST is host_only; STREAM includes the host's order; NONE is no edge."""
    plan = plan_of([("p", CPU), ("q", GPU)])
    assert plan.same_period_deps == (("c", "p"), ("c", "q"))
    assert plan.host_only == (("c", "p"),)
    plan = plan_of([("p", NONE), ("q", CPU)])
    assert plan.same_period_deps == plan.host_only == (("c", "q"),)
    assert plan_of([("p", CPU)], reads=["x"]).host_only == ()  # the slot is on a stream
    assert plan_of([("p", CPU), ("p", BOTH)]).host_only == ()


def test_what_nothing_waits_for_orders_nothing_but_must_be_there() -> None:
    """A misspelt name is an error, not a missing edge."""
    tasks = Task.from_fn("c", print, same_progress_sync=[("p", NONE)]), Task.from_fn("p", print)
    assert [task.name for task in topological_sort(one_stage(*tasks))] == ["c", "p"]
    with pytest.raises(ScheduleValidationError, match="same_progress_sync names 'q'"):
        topological_sort(one_stage(consumer([("q", NONE)])))


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_orders_the_work_before_it(waits: bool) -> None:
    """The schedule orders the host, and only the event orders the streams."""
    device = VirtualDevice()

    def produce(ctx: TaskContext) -> None:
        ctx.slots.set("x", device.launch(lambda: 1))
        ctx.record_event("half")

    def consume(ctx: TaskContext) -> None:
        assert not ctx.wait_event("whole")
        assert not waits or ctx.wait_event("half")
        ctx.slots.set("step_result", device.launch(lambda x: x, ctx.slots["x"]))

    tasks = (
        Task.from_fn("p", produce, stream="side"),
        Task.from_fn("c", consume, same_progress_sync=[("p", CPU)]),
    )
    schedule = one_stage(*tasks, streams=("default", "side"))
    with SchedulablePipeline(
        schedule, pool("side"), executor="threaded", device=device,
        check_effects=False,
    ) as pipe:  # fmt: skip
        list(results(pipe, range(5)))
    assert bool(device.violations) is not waits


def test_an_event_is_of_one_batch() -> None:
    """Without streams it says only whether the task has recorded it."""
    log = Log()
    seen: list[bool] = []

    def record(ctx: TaskContext) -> None:
        if ctx.slots["batch_cpu"] != 1:
            assert ctx.record_event("even").query()

    tasks = (
        log.task("p", record, lookahead=1),
        log.task("c", lambda ctx: seen.append(ctx.wait_event("even")), depends_on="p"),
    )
    with SchedulablePipeline(one_stage(*tasks), pool()) as pipe:
        list(results(pipe, range(3)))
    assert seen == [True, False, True]
