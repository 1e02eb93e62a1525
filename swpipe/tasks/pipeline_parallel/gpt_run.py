"""A GPT job in training under one plan: losses and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Self

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import SWPipeline
from swpipe.tasks.pipeline_parallel.gpt_job import EPOCH, GPTJob, GPTJobConfig


class GPTRun:
    """A job in training. Use it as a context manager, or call ``close``.

    Attributes:
        name: What the plan is called.
        job: The job.
        steps: How many there are in all.
        pipe: The pipeline that runs it.
        losses: One per step so far; on ranks without the last stage none.
    """

    def __init__(
        self,
        name: str,
        config: GPTJobConfig,
        plan: PipelinePlan,
        steps: int | None,
        make_job: Callable[[GPTJobConfig], GPTJob],
    ) -> None:
        self.name, self.steps = name, EPOCH if steps is None else steps
        self.job = make_job(config)
        self.pipe = SWPipeline(plan, self.job.tasks(), device=config.device)
        self.losses: list[torch.Tensor] = []
        self._batches = self.job.batches(self.steps)
        self._step_s: list[float] = []
        self._warm_s: list[float] = []

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next steps, or on as many as there are left."""
        begin, done = time.perf_counter(), 0
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            done += 1
            if ctx.losses is not None:
                self.losses.append(ctx.losses.mean())
            if on_step:
                on_step()
        self.pipe.device.synchronize()
        if done:
            times = self._step_s if timed else self._warm_s
            times.append(max(time.perf_counter() - begin, 1e-9) / done)

    @property
    def steps_per_s(self) -> float:
        """Steps per second: the median over the turns that are timed, or else over all."""
        return 1 / statistics.median(self._step_s or self._warm_s)

    def all_losses(self) -> list[torch.Tensor]:
        """The losses, on all ranks. A collective."""
        return next(held for held in self.job.over_ranks(self.losses) if held)

    def close(self) -> None:
        """Close the pipeline and the job."""
        self.pipe.close()
        self.job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def report(runs: Sequence[GPTRun]) -> str:
    """A line per run: speed, the first and the last loss, and a digest of the parameters."""
    from tabulate import tabulate

    rows = []
    for run in runs:
        losses = run.all_losses()
        first, last = (f"{float(loss):.6f}" for loss in (losses[0], losses[-1]))
        speed = f"{run.steps_per_s:.4g}"
        rows.append((run.name, len(losses), speed, first, last, run.job.digest()))
    return tabulate(
        rows,
        headers=("plan", "steps", "steps/s", "first loss", "last loss", "parameters"),
        colalign=("left", *["right"] * 5),
        disable_numparse=True,
    )
