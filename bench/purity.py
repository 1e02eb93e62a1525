"""What watching a pure task costs a step of 1 ms, beside the same plan with nobody watching.

In time of the processor: whatever else runs on the machine, the check's share is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.measure import Row, compared, interleaved
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline

STEP_US = 1000
OPERATORS = 20
WARM_UP = 50  # beyond the first iterations, which are all watched
ITERATIONS = 1000
ROUNDS = 7


def tasks(step_us: float = STEP_US) -> list[PipelineTask]:
    """A pure task of some small operators, each of which is seen when watched; and the rest."""
    matrix = torch.rand(96, 96)

    def decode(ctx: IterContext) -> None:
        ctx.x = ctx.batch
        for _ in range(OPERATORS):
            ctx.x = ctx.x * 1.5

    def train(ctx: IterContext) -> None:
        for _ in range(repeats):
            ctx.y = matrix @ matrix

    repeats = 1000
    ctx = IterContext(torch.rand(64), 0)
    begin = time.process_time()
    train(ctx)
    matmul_us = (time.process_time() - begin) * 1e6 / repeats
    repeats = max(1, round((step_us - 1.5 * OPERATORS) / matmul_us))
    return [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]


def us_per_step(given: list[PipelineTask], check: bool | None) -> Callable[[], float]:
    """Measures a step of a new pipeline, in us of the processor."""

    def measure() -> float:
        batches = [torch.rand(64) for _ in range(8)]
        data = (batches[i % 8] for i in range(WARM_UP + ITERATIONS))
        plan = PipelinePlan.serial(given)
        with SWPipeline(plan, given, device="cpu", check_effects=check) as pipe:
            for _ in range(WARM_UP):
                pipe.progress(data)
            begin = time.process_time()
            for _ in range(ITERATIONS):
                pipe.progress(data)
            return (time.process_time() - begin) / ITERATIONS * 1e6

    return measure


def rows() -> list[Row]:
    """By default two iterations in a hundred are watched."""
    given = tasks()
    ours, theirs = interleaved(ROUNDS, us_per_step(given, None), us_per_step(given, False))
    what = "a step of 1 ms with a pure task, watched by default"
    return [compared(what, ours, theirs, "us", "unwatched", 1.02, digits=0)]
