"""A GPT job in training under one plan: losses and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.core.tables import table
from swpipe.tasks.job_run import JobRun
from swpipe.tasks.pipeline_parallel.gpt_job import EPOCH, GPTJob, GPTJobConfig


class GPTRun(JobRun):
    """A job in training; ``losses`` has one per step, and on ranks without the last stage none."""

    def __init__(
        self,
        name: str,
        config: GPTJobConfig,
        plan: PipelinePlan,
        steps: int | None,
        make_job: Callable[[GPTJobConfig], GPTJob],
    ) -> None:
        steps = EPOCH if steps is None else steps
        super().__init__(name, make_job(config), plan, steps, config.device)

    def loss_of(self, ctx: Any) -> torch.Tensor | None:
        """The mean over the microbatches."""
        return None if ctx.losses is None else ctx.losses.mean()

    def all_losses(self) -> list[torch.Tensor]:
        """The losses, on all ranks. A collective."""
        return next(held for held in self.job.over_ranks(self.losses) if held)


def report(runs: Sequence[GPTRun]) -> str:
    """A line per run: speed, the first and the last loss, and a digest of the parameters."""
    rows = []
    for run in runs:
        losses = run.all_losses()
        first, last = (f"{float(loss):.6f}" for loss in (losses[0], losses[-1]))
        speed = f"{run.steps_per_s:.4g}"
        rows.append((run.name, len(losses), speed, first, last, run.job.digest()))
    return table(("plan", "steps", "steps/s", "first loss", "last loss", "parameters"), rows)
