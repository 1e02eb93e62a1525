"""A schedule is another way to write a plan."""

from __future__ import annotations

import pytest
import torch

from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.program import compile_plan
from swpipe.schedulable import (
    SameProgressSyncSide,
    SchedulablePipeline,
    Task,
    TaskContext,
    ThreadedExecutor,
)
from tests.schedulable.work import Log, one_stage, pool

GROUPS = {"copy": "io", "exchange": "io"}


def by_schedule() -> PipelinePlan:
    """Return the plan of a schedule: two tasks ahead on a thread of their own, and a step."""
    log = Log()
    tasks = (
        log.task("copy", lookahead=2, stream="memcpy", writes=["x"]),
        log.task("exchange", lookahead=1, stream="dist", reads=["x"], writes=["ids"], nccl=True),
        log.task("forward", reads=["ids", "x"], writes=["loss"]),
        log.task("backward", reads=["loss"], same_progress_sync=["exchange"], nccl=True),
        log.task("step", depends_on=["backward"]),
        log.task("stats", lookahead=1, cross_iter_depends_on=[("step", -1)]),
    )
    streams = ("default", "memcpy", "dist")
    with SchedulablePipeline(
        one_stage(*tasks, streams=streams), pool(*streams[1:]), executor=ThreadedExecutor(GROUPS)
    ) as pipe:
        return pipe.plan


def by_hand() -> PipelinePlan:
    """Return the same plan, written directly."""
    return PipelinePlan(
        {
            "copy": TaskSchedule(0, "memcpy", "io"),
            "exchange": TaskSchedule(1, "dist", "io", globally_ordered=True),
            "forward": TaskSchedule(2),
            "backward": TaskSchedule(2, globally_ordered=True),
            "step": TaskSchedule(2),
            "stats": TaskSchedule(1),
        },
        deps=[
            ("exchange", "copy"),
            ("forward", "exchange"),
            ("forward", "copy"),
            ("backward", "forward"),
            ("step", "backward"),
        ],
        cross_iter_deps=[("stats", "step", 1)],
        same_period_deps=[("backward", "exchange")],
        order=["copy", "exchange", "forward", "backward", "step", "stats"],
        within_calls=True,
    )


def test_a_schedule_and_the_plan_by_hand_compile_to_equal_programs() -> None:
    """This holds with streams and without."""
    ours, theirs = by_schedule(), by_hand()
    assert ours.schedule == theirs.schedule
    for streams in (False, True):
        a, b = (compile_plan(validate(plan), streams=streams) for plan in (ours, theirs))
        assert a == b
        assert len(a.lanes) == 2


def test_a_wait_of_the_host_is_one_of_the_stream_where_another_field_says_so() -> None:
    """What is read of the other task is on its stream."""
    log = Log()
    for reads, host_only in (([], (("b", "a"),)), (["x"], ())):
        side = {"same_progress_sync": ["a"], "same_progress_sync_sides": SameProgressSyncSide.CPU}
        tasks = (log.task("a", stream="side", writes=["x"]), log.task("b", reads=reads, **side))
        schedule = one_stage(*tasks, streams=("default", "side"))
        with SchedulablePipeline(schedule, pool("side")) as pipe:
            assert pipe.plan.host_only == host_only


def test_slots_are_attributes_of_the_context_whatever_they_are_called() -> None:
    """Replay and recordings see them; names that a context uses itself are renamed."""
    names = ("batch", "slots", "iter_idx", "__dict__", "__class__", "x y", "step_result")
    seen: list[object] = []

    def write(ctx: TaskContext) -> None:
        for name in names:
            assert name not in ctx.slots
            assert ctx.slots.get(name, 5) == 5
            ctx.slots.set(name, torch.full((1,), len(name)))

    def read(ctx: TaskContext) -> None:
        seen.extend(ctx.slots[name].item() for name in names)
        seen.append((ctx.slots["batch_cpu"], "batch_cpu" in ctx.slots, 7 in ctx.slots))

    tasks = (
        Task.from_fn("write", write, writes=names, lookahead=1),
        Task.from_fn("read", read, reads=names),
    )
    with SchedulablePipeline(one_stage(*tasks), pool()) as pipe:
        pipe.step("b")
        assert seen == [*map(len, names), ("b", True, False)]
        pipe.pipe.enable_shortcut("write")
        for _ in range(2):  # written once, then replayed
            seen.clear()
            assert pipe.step("b").item() == len("step_result")
        assert seen[: len(names)] == [*map(len, names)]


def test_a_context_says_what_it_has() -> None:
    """An empty slot is a KeyError that names the slots that are filled."""
    tasks = (Task.from_fn("a", lambda ctx: ctx.slots["nothing"]),)
    with SchedulablePipeline(one_stage(*tasks), pool()) as pipe:
        with pytest.raises(
            KeyError, match=r"slot 'nothing' of this batch is empty \(it has: batch"
        ):
            pipe.step(1)
    with SchedulablePipeline(
        one_stage(Task.from_fn("a", lambda ctx: ctx.slots.set("batch_cpu", 2))), pool()
    ) as pipe:
        with pytest.raises(ValueError, match="no task writes it"):
            pipe.step(1)
