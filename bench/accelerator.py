"""The cost of one more empty task on an accelerator.

The accelerator is CUDA if there is one, otherwise the test backend. A process cannot unload the
test backend, so this section runs last.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from bench.dispatch import nothing, us_per_task
from bench.measure import Row, compared, interleaved
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests import backend

FEW, MANY = 12, 36


def chain(tasks: int, streams: Sequence[str | None]) -> PipelinePlan:
    """Return a plan of empty tasks in sequence; they use the given streams in rotation."""
    names = [f"t{i:04}" for i in range(tasks)]
    return PipelinePlan(
        {
            PipelineTask(name, nothing): TaskSchedule(0, streams[i % len(streams)])
            for i, name in enumerate(names)
        },
        deps=list(zip(names[1:], names, strict=False)),
    )


def us_of_one_more(device: str, streams: Sequence[str | None], iterations: int) -> float:
    """Return by how much one more empty task lengthens an iteration, in us."""
    us = {}
    for tasks in (FEW, MANY):
        with SWPipeline(chain(tasks, streams), device=device) as pipe:
            us[tasks] = tasks * us_per_task(pipe, iterations, tasks)
    return (us[MANY] - us[FEW]) / (MANY - FEW)


def us_by_hand(device: str, iterations: int) -> float:
    """Return the time, in us, to switch streams, wait for an event, record one, and switch back."""
    mine, other = torch.accelerator.current_stream(), torch.Stream(device=device)
    before, after = (torch.Event(device=device) for _ in range(2))
    before.record(mine)
    begin = time.perf_counter()
    for _ in range(iterations):
        torch.accelerator.set_stream(other)
        before.wait(other)
        after.record(other)
        torch.accelerator.set_stream(mine)
    seconds = time.perf_counter() - begin
    torch.accelerator.synchronize(device)
    return seconds / iterations * 1e6


def rows(rounds: int = 15, iterations: int = 1000) -> list[Row]:
    """Compare tasks on the caller's stream with a CPU, and on other streams with calls by hand."""
    if not torch.accelerator.is_available():
        if (reason := backend.why_not()) is not None:
            return [Row("one more empty task on an accelerator", f"skipped: {reason}")]
        backend.load()
    device = str(torch.accelerator.current_accelerator())
    with contextlib.suppress(StopIteration):
        us_of_one_more(device, [None], 50)  # the first events are slow
    cpu, callers, alone, turns, by_hand = interleaved(
        rounds,
        lambda: us_of_one_more("cpu", [None], iterations),
        lambda: us_of_one_more(device, [None], iterations),
        lambda: us_of_one_more(device, ["side"], iterations),
        lambda: us_of_one_more(device, ["side", "other"], iterations),
        lambda: us_by_hand(device, 12 * iterations),
    )
    hand = "set_stream twice, wait, record"
    return [
        compared("one more empty task, caller's stream", callers, cpu, "us", "on the CPU", 3.0),
        compared("one more empty task, same other stream", alone, by_hand, "us", hand, None),
        compared("one more empty task, next stream", turns, by_hand, "us", hand, None),
    ]
