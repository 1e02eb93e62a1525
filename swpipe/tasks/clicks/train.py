"""One job in training under one plan: losses, rows and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import SWPipeline
from swpipe.tasks.clicks.decode import RejectedRow
from swpipe.tasks.clicks.job import ClickJob
from swpipe.tasks.clicks.log import ClickDataError
from swpipe.tasks.clicks.metrics import LossGuard, RunningAUC
from swpipe.tasks.workload import Job

_EXAMPLES = 5  # malformed rows that are shown


@dataclass
class RowCount:
    """Rows read in the first epoch.

    Attributes:
        lines: All of them.
        malformed: Those dropped.
        examples: The first few of these.
    """

    lines: int = 0
    malformed: int = 0
    examples: list[RejectedRow] = field(default_factory=list)

    def add(self, spec: ReadRows, rejected: Sequence[RejectedRow]) -> None:
        """Count one batch; later epochs read the same rows and are not counted."""
        if spec.epoch == 0:
            self.lines += spec.rows
            self.malformed += len(rejected)
            self.examples += rejected[: _EXAMPLES - len(self.examples)]

    @classmethod
    def total(cls, counts: Sequence[RowCount]) -> RowCount:
        """The counts of several ranks, added up."""
        return cls(
            sum(count.lines for count in counts),
            sum(count.malformed for count in counts),
            [example for count in counts for example in count.examples][:_EXAMPLES],
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Steps run from an empty pipeline to an empty pipeline.

    Attributes:
        steps: How many.
        seconds: Wall time, filling and draining included; above 0.
        timed: Whether it counts for the speed; warm-up does not.
        rows: Rows read, malformed ones included, of all ranks together.
    """

    steps: int
    seconds: float
    timed: bool = True
    rows: int = 0

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


class ReadRows(Protocol):
    """What a step has read: how many rows, and in which epoch, from 0."""

    @property
    def epoch(self) -> int: ...
    @property
    def rows(self) -> int: ...


class TrainedJob(Job, Protocol):
    """What a ``TrainRun`` needs of a job, besides what the command line does.

    ``auc`` is that of the rows that it was trained on, ``guard`` stops training when the loss is
    not finite, ``epoch_steps`` is how many steps once through the data takes, and ``spec`` tells
    what a trained batch has read.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def auc(self) -> RunningAUC: ...
    @property
    def guard(self) -> LossGuard: ...
    @property
    def epoch_steps(self) -> int: ...
    def spec(self, ctx: IterContext, /) -> ReadRows: ...


AJob = TypeVar("AJob", bound=TrainedJob)


class Range(NamedTuple):
    """Between which figures the turns of a run lie, both included."""

    least: float
    most: float


class TrainRun(Generic[AJob]):
    """One job in training under one plan. Use it as a context manager, or call ``close``.

    Args:
        name: What the plan is called.
        config: The job; it has a ``device``.
        plan: How to overlap its tasks.
        steps: How many steps there are in all; None for once through the data.
        make_job: Makes the job of the config.

    Attributes:
        name: As given.
        plan: As given.
        job: The job. On several ranks each has its share of it.
        steps: How many steps there are in all.
        pipe: The pipeline that runs it.
        losses: One per step so far; scalars on the job's device, of this rank's rows.
        chunks: The chunks so far.
        rows: Rows read so far, by this rank.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        plan: PipelinePlan,
        steps: int | None = None,
        make_job: Callable[[Any], AJob] = ClickJob,  # type: ignore[assignment]
    ) -> None:
        self.name = name
        self.plan = plan
        self.job = make_job(config)
        self.steps = self.job.epoch_steps if steps is None else steps
        self.pipe = SWPipeline(plan, self.job.tasks(), device=config.device)
        self.losses: list[torch.Tensor] = []
        self.chunks: list[Chunk] = []
        self.rows = RowCount()
        self._batches = self.job.batches(steps)

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next ``steps`` batches, or on as many as there are left.

        Args:
            steps: How many.
            on_step: Called after each.
            timed: These steps count for the speed.

        Raises:
            TrainingDivergedError: A loss is not finite.
            MalformedRowError: A row is malformed, and the config is strict.
            ClickDataError: Every row so far is malformed.
        """
        before, read = len(self.losses), 0
        begin = time.perf_counter()
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            self.losses.append(ctx.loss.detach())
            spec = self.job.spec(ctx)
            self.rows.add(spec, getattr(ctx, "rejected", ()))
            read += spec.rows
            if on_step:
                on_step()
        self.pipe.device.synchronize()
        seconds = max(time.perf_counter() - begin, 1e-9)  # a clock may stand still
        done = len(self.losses) - before
        self.job.guard.check()
        rows, read_by_all = self.all_rows(), sum(self.job.over_ranks(read))
        if rows.lines and rows.malformed == rows.lines:
            raise ClickDataError(
                f"not one good row among {rows.lines}; the first: {rows.examples[0]}"
            )
        if done:
            self.chunks.append(Chunk(done, seconds, timed, read_by_all))

    @property
    def timed(self) -> list[Chunk]:
        """The chunks that count for the speed; all of them where none is timed."""
        return [chunk for chunk in self.chunks if chunk.timed] or self.chunks

    @property
    def timed_steps(self) -> int:
        """Steps in these chunks."""
        return sum(chunk.steps for chunk in self.timed)

    @property
    def steps_per_s(self) -> float:
        """Steps per second: the median over these chunks."""
        return 1 / statistics.median(chunk.step_s for chunk in self.timed)

    @property
    def range_per_s(self) -> Range | None:
        """Range of the steps per second over these chunks; None of one chunk."""
        speeds = [1 / chunk.step_s for chunk in self.timed]
        return Range(min(speeds), max(speeds)) if len(speeds) > 1 else None

    @property
    def rows_per_s(self) -> float:
        """Rows per second, malformed ones included, of all ranks: the median over these chunks."""
        return statistics.median(chunk.rows / chunk.seconds for chunk in self.timed)

    def recent_loss(self) -> float:
        """Mean loss of the last 50 steps, over all ranks."""
        own = float(torch.stack(self.losses[-50:]).mean())
        return statistics.fmean(self.job.over_ranks(own))

    def all_rows(self) -> RowCount:
        """Rows read so far, by all ranks."""
        return RowCount.total(self.job.over_ranks(self.rows))

    def auc(self) -> float:
        """The running AUC, over all ranks; NaN until both labels have been seen."""
        counts = torch.stack(self.job.over_ranks(self.job.auc.counts.cpu())).sum(0)
        return self.job.auc.area(counts)

    def close(self) -> None:
        """Close the pipeline and the job."""
        self.pipe.close()
        self.job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()
