"""What watching a pure task costs a step of 1 ms, beside the same plan with nobody watching."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from tests.bench.measure import Row, compared, interleaved

STEP_US = 1000
WARM_UP = 50  # beyond the first iterations, which are all watched
ITERATIONS = 1000
ROUNDS = 7


def spin(us: float) -> None:
    """Keep the processor busy for so long."""
    end = time.perf_counter() + us * 1e-6
    while time.perf_counter() < end:
        pass


def decode(ctx: IterContext) -> None:
    """Some small operators, each of which is seen when it is watched."""
    x = ctx.batch
    for _ in range(10):
        x = x * 1.5 + 1.0
    ctx.x = x


def train(ctx: IterContext) -> None:
    """The rest of the step."""
    spin(STEP_US - 100)
    ctx.y = ctx.x.sum()


TASKS = [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]
PLAN = PipelinePlan.serial(TASKS)


def us_per_step(check: bool | None) -> Callable[[], float]:
    """Measures a step of a new pipeline, in us."""

    def measure() -> float:
        batches = [torch.rand(64) for _ in range(8)]
        data = (batches[i % 8] for i in range(WARM_UP + ITERATIONS))
        with SWPipeline(PLAN, TASKS, device="cpu", check_effects=check) as pipe:
            for _ in range(WARM_UP):
                pipe.progress(data)
            begin = time.perf_counter()
            for _ in range(ITERATIONS):
                pipe.progress(data)
            return (time.perf_counter() - begin) / ITERATIONS * 1e6

    return measure


def rows() -> list[Row]:
    """The check samples two iterations in a hundred."""
    ours, theirs = interleaved(ROUNDS, us_per_step(None), us_per_step(False))
    what = "a step of 1 ms with a pure task, watched by default"
    return [compared(what, ours, theirs, "us", "unwatched", 1.02)]
