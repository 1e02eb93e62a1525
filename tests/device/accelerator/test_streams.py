"""Streams overlap; threads use the right device, with the caller's modes."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, StreamSpec, SWPipeline, TaskSchedule
from tests.device.accelerator.work import (
    DEVICE,
    SIMULATED,
    Mark,
    Time,
    covered,
    current_priority,
    needs_gpu_clock,
    own_stream,
    run,
    spin,
    warm_up,
)

ITERATIONS = 12
STEADY = range(4, ITERATIONS - 2)
"""Iterations of which some overlap, if the plan allows it: a busy host launches others late."""
MS = 5.0
COPIED = 2**20 if SIMULATED else 64 * 2**20
"""Elements of four bytes that take some ms to copy."""


def spinning(marks: dict[str, dict[int, Mark]], name: str, ms: float = MS) -> PipelineTask:
    """Return a task whose device work takes ``ms`` and is recorded in ``marks``."""

    def fn(ctx: IterContext) -> None:
        marks[name][ctx.iter_idx] = Mark()
        with marks[name][ctx.iter_idx]:
            spin(ms)

    return PipelineTask(name, fn)


def times(marks: dict[int, Mark], start: torch.Event) -> dict[int, Time]:
    """Return the span of each iteration's work, in ms after ``start``."""
    return {i: mark.span_ms(start) for i, mark in marks.items()}


def origin() -> torch.Event:
    """Return an event from which spans are measured."""
    event = torch.Event(device=DEVICE, enable_timing=True)
    event.record()
    return event


@pytest.mark.parametrize("group", ["default", "io"])
def test_kernels_on_two_streams_overlap(group: str) -> None:
    """One iteration's work on one stream overlaps another's, from one thread or from two."""
    marks: dict[str, dict[int, Mark]] = defaultdict(dict)
    plan = PipelinePlan(
        {
            spinning(marks, "ahead"): TaskSchedule(0, "side", group),
            spinning(marks, "compute"): TaskSchedule(1),
        },
        deps=[("compute", "ahead")],
        pipeline_depth=3,
    )
    start = origin()
    run(plan, range(ITERATIONS))
    torch.accelerator.synchronize()
    ahead, compute = times(marks["ahead"], start), times(marks["compute"], start)
    assert max(covered(compute[i], ahead.values()) for i in STEADY) > 0.5
    assert all(ahead[i][1] <= compute[i][0] for i in STEADY)  # its own comes first


def test_a_copy_overlaps_with_a_kernel() -> None:
    """A copy from pinned memory overlaps the previous iteration."""
    marks: dict[str, dict[int, Mark]] = defaultdict(dict)
    batch = torch.arange(COPIED, dtype=torch.int32).pin_memory()

    def copy(ctx: IterContext) -> None:
        marks["copy"][ctx.iter_idx] = Mark()
        with marks["copy"][ctx.iter_idx]:
            ctx.x = ctx.batch.to(DEVICE, non_blocking=True)

    plan = PipelinePlan(
        {
            PipelineTask("copy", copy): TaskSchedule(0, "memcpy"),
            spinning(marks, "compute", 10.0): TaskSchedule(1),
        },
        deps=[("compute", "copy")],
        pipeline_depth=3,
    )
    start = origin()
    run(plan, [batch] * ITERATIONS)
    torch.accelerator.synchronize()
    copy_ms, compute_ms = times(marks["copy"], start), times(marks["compute"], start)
    assert max(covered(copy_ms[i], compute_ms.values()) for i in STEADY) > 0.5


@needs_gpu_clock
def test_overlap_shows_in_wall_time() -> None:
    """Three streams of equal work take much less than the serial run of the same tasks."""
    marks: dict[str, dict[int, Mark]] = defaultdict(dict)
    plan = PipelinePlan(
        {
            spinning(marks, "a"): TaskSchedule(0, "one"),
            spinning(marks, "b"): TaskSchedule(1, "two"),
            spinning(marks, "c"): TaskSchedule(2),
        },
        deps=[("b", "a"), ("c", "b")],
        pipeline_depth=4,
    )
    warm_up()
    with SWPipeline(plan, device=DEVICE) as pipe:
        serial = pipe.run_serial(range(20)).seconds
        piped = pipe.run(range(20)).seconds
    assert piped < 0.6 * serial


def test_a_streams_priority_is_the_plans() -> None:
    """``StreamSpec.priority`` reaches the device."""
    found: dict[str, int] = {}

    def look(name: str) -> PipelineTask:
        return PipelineTask(name, lambda ctx: found.update({name: current_priority()}))

    plan = PipelinePlan(
        {look("urgent"): TaskSchedule(0, "urgent"), look("plain"): TaskSchedule(0, "plain")},
        streams={"urgent": StreamSpec(priority=-1)},
    )
    run(plan, range(1))
    assert found == {"urgent": -1, "plain": 0}


def test_a_stream_object_is_taken_as_it_is() -> None:
    """``torch.Stream`` and ``torch.cuda.Stream`` objects are accepted in place of names."""
    for mine in (torch.Stream(device=DEVICE), own_stream()):
        seen: list[int] = []

        def look(ctx: IterContext, seen: list[int] = seen) -> None:
            seen.append(torch.accelerator.current_stream().stream_id)

        run(PipelinePlan({PipelineTask("look", look): TaskSchedule(0, mine)}), range(2))
        assert seen == [mine.stream_id] * 2


@needs_gpu_clock
def test_the_host_does_not_wait_for_the_device_within_the_depth() -> None:
    """Submitting as many iterations as the depth allows takes a fraction of their work's time."""
    marks: dict[str, dict[int, Mark]] = defaultdict(dict)
    plan = PipelinePlan({spinning(marks, "compute", 50.0): TaskSchedule(0)}, pipeline_depth=3)
    warm_up()
    data = iter(range(3))
    with SWPipeline(plan, device=DEVICE) as pipe:
        begin = time.perf_counter()
        pipe.progress(data)
        seconds = time.perf_counter() - begin
        pipe.drain()
    assert seconds < 0.05
