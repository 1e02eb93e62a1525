"""What a task of a schedule costs beside a task of a plan; what ``basic`` gains over a plain loop.

The second has a batch whose copy takes as long as the rest of the step: at best half is left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.dispatch import nothing, plan, us_per_task
from bench.measure import Row, Spread, compared, interleaved, tolerated
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.schedulable import SchedulablePipeline, Schedule, Stage, StreamPool, Task, TaskContext

TASKS = 12
MOST_MORE_US = 2.0
"""What a task of a schedule may cost more."""

COPY_S = 0.004
STEPS = 150
MOST_OF_PLAIN = 1 / 1.6


class ByContext:
    """A schedule, driven for contexts like a pipeline."""

    def __init__(self, schedule: SchedulablePipeline) -> None:
        self._schedule = schedule

    def progress(self, iterator: Iterator[Any]) -> IterContext:
        result: IterContext = self._schedule.progress(iterator)
        return result


def by_slots(ctx: TaskContext) -> None:
    """Read a slot and fill one."""
    slots = ctx.slots
    slots.set("x", slots["batch_cpu"])


def by_attributes(ctx: IterContext) -> None:
    """The same with attributes of the context."""
    ctx.x = ctx.batch


def schedule(fn: Callable[[Any], None]) -> Schedule:
    """The chain of ``bench.dispatch`` in three stages, as a schedule."""
    names = [f"t{i:04}" for i in range(TASKS)]
    tasks = [
        Task.from_fn(name, fn, lookahead=2 - i * 3 // TASKS, depends_on=names[max(0, i - 1) : i])
        for i, name in enumerate(names)
    ]
    return Schedule((Stage(tuple(tasks)),))


def task_rows(
    what: str,
    ours_fn: Callable[[Any], None],
    theirs_fn: Callable[[IterContext], None],
    rounds: int,
    iterations: int,
) -> list[Row]:
    """Small tasks on the caller's thread."""
    by_hand = plan(["default"], depth=3)
    tasks = [PipelineTask(name, theirs_fn) for name in by_hand.schedule]
    with (
        SchedulablePipeline(schedule(ours_fn), StreamPool({"default": None}), device="cpu") as ours,
        SWPipeline(by_hand, tasks, device="cpu") as theirs,
    ):
        a, b = interleaved(
            rounds,
            lambda: us_per_task(ByContext(ours), iterations),
            lambda: us_per_task(theirs, iterations),
        )
    more = Spread.of(one - other for one, other in zip(a, b, strict=True)).median
    return [
        compared(f"{TASKS} {what} of a schedule", a, b, "us/task", "PipelineTasks"),
        tolerated(f"{what} of a schedule, more", more, MOST_MORE_US, "us/task", digits=2),
    ]


class SlowBatch:
    """Takes a while to copy."""

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        time.sleep(COPY_S)
        return torch.ones(4, 8)


class SlowModel(nn.Linear):
    """Takes as long to compute."""

    def forward(self, batch: Tensor) -> Tensor:
        time.sleep(COPY_S)
        return super().forward(batch).sum()


def trained(run: Callable[[SlowModel, torch.optim.Optimizer], None]) -> Callable[[], float]:
    """Measures a loop over ``STEPS`` batches, in ms per step."""

    def measure() -> float:
        model = SlowModel(8, 1)
        begin = time.perf_counter()
        run(model, torch.optim.SGD(model.parameters(), 0.1))
        return (time.perf_counter() - begin) / STEPS * 1e3

    return measure


def plain(model: SlowModel, optimizer: torch.optim.Optimizer) -> None:
    """The loop as it is."""
    for batch in [SlowBatch()] * STEPS:
        optimizer.zero_grad()
        loss = model(batch.to(torch.device("cpu"), non_blocking=True))
        loss.backward()
        optimizer.step()


def basic(model: SlowModel, optimizer: torch.optim.Optimizer) -> None:
    """The same by ``basic``."""
    with (
        SchedulablePipeline.basic(
            model, optimizer, prefetch=True, memcpy_stream=True, threaded=True
        ) as pipe,
        contextlib.suppress(StopIteration),
    ):
        batches = iter([SlowBatch()] * STEPS)
        while True:
            pipe.progress(batches)


def rows(rounds: int = 15, iterations: int = 1000) -> list[Row]:
    """Both."""
    ours, theirs = interleaved(max(3, rounds // 3), trained(basic), trained(plain))
    what = "copy as long as the step, basic(prefetch, memcpy_stream, threaded)"
    return [
        *task_rows("empty tasks", nothing, nothing, rounds, iterations),
        *task_rows("tasks of two slots", by_slots, by_attributes, rounds, iterations),
        compared(what, ours, theirs, "ms/step", "the plain loop", MOST_OF_PLAIN),
    ]
