"""Schedules on asynchronous streams: work waits for work, whichever thread submits it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe.device.accelerator import plain
from swpipe.schedulable import (
    SchedulablePipeline,
    SequentialExecutor,
    StreamPool,
    Task,
    TaskContext,
    ThreadedExecutor,
)
from tests.device.accelerator.work import extremes, filled, own_stream, spin, wrong
from tests.schedulable.test_delegation import VerboseExecutor
from tests.schedulable.work import one_stage, results

BATCHES = 12

EXECUTORS: dict[str, Any] = {
    "one thread": None,
    "by_stream": "threaded",
    "per_task": ThreadedExecutor("per_task"),
    "own": VerboseExecutor(SequentialExecutor()),
}


@pytest.mark.parametrize(
    ("executor", "given", "ahead"),
    [("one thread", True, 0), ("by_stream", True, 1), ("per_task", False, 1), ("own", True, 1)],
)
def test_what_a_task_reads_on_another_stream_is_there(
    executor: str, given: bool, ahead: int
) -> None:
    """The streams are the pool's, or swpipe's; the caller may read the result at once."""
    seen: dict[int, Tensor] = {}
    streams = {name: own_stream() if given else None for name in ("memcpy", "side")}
    current: set[torch.Stream] = set()

    def copy(ctx: TaskContext) -> None:
        current.add(torch.accelerator.current_stream())
        spin(1.0)
        ctx.slots.set("x", filled(ctx.slots["batch_cpu"] + 1))

    def compute(ctx: TaskContext) -> None:
        spin(3.0)
        ctx.slots.set("y", ctx.slots["x"] * 2)
        ctx.slots.set("x", None)  # its memory goes back to the stream of the copy

    def result(ctx: TaskContext) -> None:
        ctx.slots.set("step_result", ctx.slots["y"] / 2)

    schedule = one_stage(
        Task.from_fn("copy", copy, lookahead=2, stream="memcpy", writes=["x"]),
        Task.from_fn("compute", compute, lookahead=ahead, reads=["x"], writes=["y"]),
        Task.from_fn("result", result, stream="side", reads=["y"], writes=["step_result"]),
        streams=("default", "memcpy", "side"),
    )
    pool = StreamPool({"default": None, **streams})
    with SchedulablePipeline(schedule, pool, executor=EXECUTORS[executor]) as pipe:
        for i, value in enumerate(results(pipe, range(BATCHES))):
            seen[i] = extremes(value)
    assert wrong(seen) == []
    if given:
        assert current == {plain(streams["memcpy"])}
