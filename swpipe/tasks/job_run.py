"""Any job in training under one plan: losses and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Self

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.core.tables import table
from swpipe.pipeline import SWPipeline
from swpipe.tasks.workload import InputError, Job, Training


class JobRun:
    """A job in training. Use it as a context manager, or call ``close``.

    Args:
        name: What the plan is called.
        job: The job. Its ``epoch_steps`` is how many steps once through its data takes. It may have
            a ``model``, to be compared, and a ``context``, the class of its contexts.
        plan: How to overlap its tasks.
        steps: How many there are in all; None for once through the data.
        device: As for ``SWPipeline``.

    Attributes:
        steps: How many there are in all.
        pipe: The pipeline that runs the job.
        losses: ``loss_of`` each step so far that has one.
        turns_s: Seconds per step, of each turn that is timed.
    """

    def __init__(
        self, name: str, job: Any, plan: PipelinePlan, steps: int | None, device: Any = None
    ) -> None:
        self.name, self.job = name, job
        self.steps: int = job.epoch_steps if steps is None else steps
        context = getattr(job, "context", None)
        self.pipe = SWPipeline(plan, job.tasks(), device=device, context=context)
        self.losses: list[float | torch.Tensor] = []
        self.turns_s: list[float] = []
        self._untimed_s: list[float] = []
        self._batches: Iterator[Any] = job.batches(self.steps)

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next steps, or on as many as there are left.

        Raises:
            InputError: None is left, though there should be more.
        """
        begin, done = time.perf_counter(), 0
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            done += 1
            loss = self.loss_of(ctx)
            if loss is not None:
                self.losses.append(loss)
            if on_step:
                on_step()
        self.pipe.device.synchronize()
        if done:
            times = self.turns_s if timed else self._untimed_s
            times.append(max(time.perf_counter() - begin, 1e-9) / done)
        elif steps and not (self.turns_s or self._untimed_s):
            raise InputError(f"plan {self.name}: the workload gives no batch; return some")

    def loss_of(self, ctx: Any) -> float | torch.Tensor | None:
        """The step's loss: ``ctx.loss``, if it is a number."""
        there = "loss" in vars(ctx) or hasattr(type(ctx), "loss")  # it may have gone by keep
        loss = ctx.loss if there else None
        if isinstance(loss, torch.Tensor):
            return loss.detach() if loss.numel() == 1 else None
        return loss if isinstance(loss, float) else None

    @property
    def steps_per_s(self) -> float:
        """Steps per second: the median over the turns that are timed, or else over all."""
        return 1 / statistics.median(self.turns_s or self._untimed_s)

    def close(self) -> None:
        """Close the pipeline and the job."""
        self.pipe.close()
        self.job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def training_of(open_job: Callable[[Any], Job]) -> Training:
    """How `swpipe train` trains a job; its configuration has a ``device``."""

    def open_run(name: str, config: Any, plan: PipelinePlan, steps: int | None) -> JobRun:
        return JobRun(name, open_job(config), plan, steps, config.device)

    return Training(open_run, report)


def report(runs: Sequence[JobRun]) -> str:
    """A line per run, and how the others compare with the first."""
    rows = []
    for run in runs:
        speeds = [f"{1 / seconds:.4g}" for seconds in sorted(run.turns_s, reverse=True)]
        between = f"{speeds[0]} to {speeds[-1]}" if len(speeds) > 1 else "n/a"
        ends = [f"{float(loss):.4f}" for loss in run.losses[:: max(1, len(run.losses) - 1)]]
        loss = " to ".join(ends) or "n/a"
        rows.append((run.name, run.steps, f"{run.steps_per_s:.4g}", between, loss))
    titles = ("plan", "steps", "steps/s", "range", "loss")
    return "\n".join([table(titles, rows), *(_compared(runs[0], other) for other in runs[1:])])


def _compared(first: JobRun, other: JobRun) -> str:
    ratio = other.steps_per_s / first.steps_per_s
    names = f"{other.name} over {first.name}: {ratio:.2f} times as many steps per second"
    losses = zip(first.losses, other.losses, strict=False)
    equal = [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in losses]
    apart = [step for step, same in enumerate(equal) if not same]
    if apart:
        return f"{names}; NOT EQUAL: losses differ from step {apart[0]} on"
    models = [getattr(run.job, "model", None) for run in (first, other)]
    parameters = [list(model.parameters()) for model in models if model is not None]
    if not all(map(torch.equal, *parameters) if len(parameters) > 1 else ()):
        return f"{names}; NOT EQUAL: parameters differ"
    if not first.losses:
        return f"{names}; no ctx.loss to compare"
    what = f" and {len(parameters[0])} parameters" if parameters else ""
    return f"{names}; bit-equal: {len(first.losses)} losses{what}"
