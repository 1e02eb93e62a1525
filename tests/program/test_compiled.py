"""A compiled plan waits where it must, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe import HOST, PipelinePlan, TaskSchedule
from swpipe.core.resolved import resolve_plan
from swpipe.program import (
    ADMIT,
    RETIRE,
    EventWait,
    Instruction,
    Program,
    compile_plan,
)
from tests.support.plans_for_tests import spread


def lanes(program: Program) -> dict[str, list[str]]:
    """Return the task names of each group, in lane order."""
    return {lane.group: [ins.task for ins in lane.instructions] for lane in program.lanes}


def host_waits(ins: Instruction) -> set[tuple[str, int]]:
    """Return (producer, lag) of an instruction's host waits."""
    return {(wait.producer, wait.lag) for wait in ins.host_waits}


def test_ties_go_to_worker_groups_then_higher_stages_then_declaration() -> None:
    """Without edges of lag 0, the order within a period follows the rules of the design."""
    plan = PipelinePlan(
        schedule={
            "main0": TaskSchedule(stage=0),
            "main2": TaskSchedule(stage=2),
            "io0": TaskSchedule(stage=0, thread_group="io"),
            "io1b": TaskSchedule(stage=1, thread_group="io"),
            "io1c": TaskSchedule(stage=1, thread_group="io"),
        }
    )
    assert list(resolve_plan(plan).period_order) == ["io1b", "io1c", "io0", "main2", "main0"]


def next_batch(**dist: Any) -> PipelinePlan:
    """Return a plan that reads and exchanges the next batch on two threads while it trains."""
    return PipelinePlan(
        schedule={
            "read": TaskSchedule(thread_group="io"),
            "dist": TaskSchedule(**{"thread_group": "dist", "globally_ordered": True} | dist),
            "train": TaskSchedule(stage=2, globally_ordered=True),
        },
        deps=[("dist", "read"), ("train", "dist")],
    )


@pytest.mark.parametrize("turns", [{}, {"globally_ordered": False, "stream": "net"}])
def test_training_does_not_wait_for_the_input_of_a_later_batch(turns: dict[str, Any]) -> None:
    """The exchange of a batch that is read in the same period comes after training."""
    plan = next_batch(**turns)
    train = replace(plan.schedule["train"], stream="net") if turns else plan.schedule["train"]
    plan = replace(plan, schedule={**plan.schedule, "train": train})
    assert list(resolve_plan(plan).period_order) == ["read", "train", "dist"]


@pytest.mark.parametrize(
    "dist",
    [
        {"stage": 1},  # the batch was read a period ago
        {"stage": 2},  # of the same iteration as training
        {"globally_ordered": False},  # it takes no turns
    ],
)
def test_an_exchange_whose_input_is_there_overlaps_with_training(dist: dict[str, Any]) -> None:
    """It comes first, so that it is in progress while the model trains on this batch."""
    assert list(resolve_plan(next_batch(**dist)).period_order)[-1] == "train"


def through_the_host(**count: Any) -> PipelinePlan:
    """Return a plan with host tasks between tasks on streams."""
    return PipelinePlan(
        schedule={
            "make": TaskSchedule(stream="make"),
            "name": TaskSchedule(stream=HOST, thread_group="io"),
            "count": TaskSchedule(**{"stage": 1, "stream": HOST, "thread_group": "io"} | count),
            "use": TaskSchedule(stage=2, stream="use"),
        },
        deps=[("name", "make"), ("use", "count")],
        cross_iter_deps=[("count", "name", 2), ("count", "count", 1)],
    )


def test_a_task_of_the_host_alone_has_no_event() -> None:
    """No task waits for the stream that it would have had."""
    program = compile_plan(resolve_plan(through_the_host()), streams=True)
    for name in ("name", "count"):
        assert not program.instructions[name].record
        assert program.instructions[name].event_waits == ()
    waits = program.instructions["use"].event_waits
    assert {wait.producer for wait in waits} == {ADMIT, "make"}


def test_whoever_comes_after_a_task_of_the_host_alone_waits_for_what_it_came_after() -> None:
    """Event waits pass through such tasks, and events are held for the sum of the distances."""
    program = compile_plan(resolve_plan(through_the_host()), streams=True)
    assert EventWait("make", 2) in program.instructions["use"].event_waits
    assert program.ring == program.depth + 2
    plan = replace(through_the_host(), cross_iter_deps=[("count", "name", 1), ("name", "count", 3)])
    far = replace(
        plan, deps=[("name", "make")], cross_iter_deps=[*plan.cross_iter_deps, ("use", "count", 4)]
    )
    program = compile_plan(resolve_plan(far), streams=True)
    assert EventWait("make", 5) in program.instructions["use"].event_waits
    assert program.ring == program.depth + 5


def test_many_tasks_of_the_host_alone_that_wait_for_each_other_compile() -> None:
    """The shortest path counts; the number of paths grows exponentially."""
    names = [f"h{n}" for n in range(9)]
    plan = PipelinePlan(
        schedule={
            "make": TaskSchedule(stream="make"),
            **dict.fromkeys(names, TaskSchedule(stream=HOST)),
            "use": TaskSchedule(stream="use"),
        },
        deps=[*((name, "make") for name in names), *(("use", name) for name in names)],
        cross_iter_deps=[(a, b, 1 + n) for n, a in enumerate(names) for b in names],
    )
    program = compile_plan(resolve_plan(plan), streams=True)
    assert set(program.instructions["use"].event_waits) == {EventWait("make", 0)}


def test_tasks_of_the_host_alone_have_no_stream_in_common() -> None:
    """Their order is free, unlike that of tasks on a named stream."""
    program = compile_plan(resolve_plan(through_the_host(thread_group="aux")), streams=True)
    crossing = [w for ins in program.instructions.values() for w in ins.host_waits]
    assert {w.producer for w in crossing} <= {ADMIT, "make", "name", "count", "use"}
    assert ("count", 1) not in host_waits(program.instructions["name"])


def test_the_plans_own_order_decides_first() -> None:
    """``order`` outranks group, stage and declaration."""
    plan = PipelinePlan(
        schedule={
            "a": TaskSchedule(),
            "b": TaskSchedule(thread_group="io"),
            "c": TaskSchedule(stage=1),
        },
        deps=[("b", "a"), ("b", "a")],  # said twice
        order=["a", "b"],
    )
    assert len(resolve_plan(plan).dependences) == 1
    assert list(resolve_plan(plan).period_order) == ["c", "a", "b"]


def test_no_event_wait_is_implied_by_the_one_for_the_batch() -> None:
    """Batches from the host have no event, so that a path through the admission orders nothing."""
    plan = PipelinePlan(
        schedule={"read": TaskSchedule(1), "write": TaskSchedule(0, stream="side")},
        cross_iter_deps=[("write", "read", 1)],
    )
    program = compile_plan(resolve_plan(plan), streams=True).instructions
    assert EventWait("read", 1) in program["write"].event_waits


@pytest.mark.parametrize(
    ("depth", "streams", "lane"),
    [
        (3, False, [ADMIT, "forward", "dist", "h2d", RETIRE]),
        (3, True, ["forward", "dist", ADMIT, "h2d", RETIRE]),
        (4, True, ["forward", "dist", "h2d", ADMIT, RETIRE]),
    ],
)
def test_a_device_has_older_iterations_work_before_the_host_waits_to_admit(
    depth: int, streams: bool, lane: list[str]
) -> None:
    """On a device, admission comes right before the first task that needs it."""
    plan = PipelinePlan(
        schedule={"h2d": TaskSchedule(0), "dist": TaskSchedule(1), "forward": TaskSchedule(2)},
        deps=[("dist", "h2d"), ("forward", "dist")],
        pipeline_depth=depth,
        run_ahead=2,
    )
    program = compile_plan(resolve_plan(plan), streams=streams)
    assert lanes(program)["default"] == lane
    assert program.order == tuple(lane)
    assert program.tasks == ("forward", "dist", "h2d")
    assert program.launch_limit == (2 if streams else None)


@pytest.mark.parametrize("other", [None, "side"])
def test_a_stream_object_is_another_stream_than_the_callers_or_a_named_one(
    other: str | None,
) -> None:
    """``torch.Stream != None`` is False in torch; the compiler handles this."""
    mine = torch.Stream(stream_id=3, device_index=0, device_type=1)
    plan = PipelinePlan(
        schedule={"make": TaskSchedule(0, mine), "use": TaskSchedule(0, other)},
        deps=[("use", "make")],
    )
    program = compile_plan(resolve_plan(plan), streams=True).instructions
    assert program["use"].event_waits == (EventWait("make", 0),)


def test_without_streams_there_are_no_events_and_no_stream_order() -> None:
    """On a CPU, tasks that name one stream from two threads do not wait for each other."""
    plan = PipelinePlan(
        schedule={
            "a": TaskSchedule(stream="s", thread_group="one"),
            "b": TaskSchedule(stream="s", thread_group="two"),
        },
        pipeline_depth=2,
    )
    on_cpu = compile_plan(resolve_plan(plan), streams=False).instructions
    assert host_waits(on_cpu["a"]) == host_waits(on_cpu["b"]) == {(ADMIT, 1)}
    assert not any(ins.event_waits or ins.record for ins in on_cpu.values() if ins.task != ADMIT)
    on_device = compile_plan(resolve_plan(plan), streams=True).instructions
    assert host_waits(on_device["b"]) == {("a", 0)}
    assert host_waits(on_device["a"]) == {("b", 1), (ADMIT, 1)}


def test_more_depth_lets_workers_run_ahead_of_the_caller() -> None:
    """Each additional iteration moves the tasks one period behind their admission."""
    plan = replace(spread(), pipeline_depth=6)
    program = compile_plan(resolve_plan(plan), streams=False).instructions
    assert host_waits(program["h2d"]) == {(ADMIT, 2)}
    assert program[RETIRE].stage == program["step"].stage == 5


def test_events_are_held_as_long_as_some_dependence_can_ask_for_them() -> None:
    """The ring has room for the depth and the largest distance."""
    plan = PipelinePlan(
        schedule={"a": TaskSchedule(stream="s"), "b": TaskSchedule()},
        cross_iter_deps=[("b", "a", 7)],
        pipeline_depth=2,
    )
    assert compile_plan(resolve_plan(plan), streams=True).ring == 9


@pytest.mark.parametrize("distance", [1, 3])
def test_an_older_iteration_is_implied_by_a_newer_one(distance: int) -> None:
    """Waiting for a producer's work on this iteration covers its work on earlier ones."""
    plan = PipelinePlan(
        schedule={
            "a": TaskSchedule(2, stream="s", thread_group="io"),
            "b": TaskSchedule(2, stream="t"),
            # Around its stream, from a to a again, what is known of the order spans two iterations.
            "ahead": TaskSchedule(0, stream="s", thread_group="io"),
        },
        deps=[("b", "a")],
        cross_iter_deps=[("b", "a", distance)],
    )
    b = compile_plan(resolve_plan(plan), streams=True).instructions["b"]
    assert host_waits(b) == {("a", 0)}
    assert b.event_waits == (EventWait("a", 0),)


def test_a_wait_for_the_future_of_another_iteration_is_never_dropped() -> None:
    """An edge of negative distance binds iterations that others do not; therefore it stays."""
    plan = PipelinePlan(
        schedule={
            "prefetch": TaskSchedule(stage=0, stream="s"),
            "backward": TaskSchedule(stage=1),
        },
        deps=[("backward", "prefetch")],
        same_period_deps=[("backward", "prefetch")],
    )
    backward = compile_plan(resolve_plan(plan), streams=True).instructions["backward"]
    assert set(backward.event_waits) == {EventWait("prefetch", 0), EventWait("prefetch", -1)}


def test_a_later_task_of_a_stream_stands_for_an_earlier_one() -> None:
    """It may work on an older iteration: the stream did the earlier task before that."""
    plan = PipelinePlan(
        {
            "a": TaskSchedule(0, stream="one"),
            "b": TaskSchedule(1, stream="one"),
            "c": TaskSchedule(1, stream="two"),
        },
        deps=[("c", "a"), ("c", "b")],
        order=["a", "b", "c"],
    )
    program = compile_plan(resolve_plan(plan), streams=True)
    assert program.instructions["c"].event_waits == (EventWait("b", 0),)


def test_whether_a_worker_is_past_an_iteration_is_always_known() -> None:
    """A failing worker waits for those before it, also if no other task waits for them.

    That is implied here: before retirement the worker has come to its next iteration.
    """
    plan = PipelinePlan(
        {
            "read": TaskSchedule(0, thread_group="io", workers=2),
            "note": TaskSchedule(0, thread_group="io", workers=2),
            "train": TaskSchedule(1),
            "log": TaskSchedule(4),
        },
        deps=[("train", "read")],
    )
    program = compile_plan(resolve_plan(plan), streams=False)
    waited_for = {w.producer for ins in program.instructions.values() for w in ins.host_waits}
    assert "note" not in waited_for
    assert program.instructions["note"].publish
