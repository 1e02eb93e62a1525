"""One job in training under one plan: what it has met, and how long it took."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Self

import torch

from swpipe.context import IterContext
from swpipe.pipeline import SWPipeline
from swpipe.plan import PipelinePlan
from swpipe.task import PipelineTask, TaskFn
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.decode import RejectedRow
from swpipe.tasks.clicks.job import ClickJob
from swpipe.tasks.clicks.log import ClickDataError

_EXAMPLES = 5  # malformed rows that are shown


@dataclass
class RowCount:
    """Rows met in the first epoch.

    Attributes:
        lines: All of them.
        malformed: Those dropped.
        examples: The first few of these.
    """

    lines: int = 0
    malformed: int = 0
    examples: list[RejectedRow] = field(default_factory=list)

    def add(self, ctx: IterContext) -> None:
        """Count one batch; later epochs meet the same rows again and are not counted."""
        if ctx.batch.epoch == 0:
            self.lines += ctx.batch.rows
            self.malformed += len(ctx.rejected)
            self.examples += ctx.rejected[: _EXAMPLES - len(self.examples)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Steps run in one go, from an empty pipeline to an empty pipeline.

    Attributes:
        steps: How many.
        seconds: Wall time, filling and draining included.
        task_s: Task name to the seconds its calls took, all together.
        timed: It counts when speed is told; warming up, for one, does not.
    """

    steps: int
    seconds: float
    task_s: dict[str, float]
    timed: bool = True

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


class TrainRun:
    """One job in training under one plan. Use it as a context manager, or call ``close``.

    Args:
        name: What the plan is called.
        config: The job.
        plan: How to overlap its tasks.
        steps: How many steps there are in all; None for once through the data.

    Attributes:
        name: As given.
        plan: As given.
        job: The job.
        steps: How many steps there are in all.
        pipe: The pipeline that runs it.
        losses: One per step so far; scalars on the job's device.
        chunks: What was run so far.
        rows: Rows met so far.
    """

    def __init__(
        self, name: str, config: ClickConfig, plan: PipelinePlan, steps: int | None = None
    ) -> None:
        self.name = name
        self.plan = plan
        self.job = ClickJob(config)
        self.steps = len(self.job.log) if steps is None else steps
        self._task_s: dict[str, float] = defaultdict(float)
        tasks = [self._clocked(task) for task in self.job.tasks()]
        self.pipe = SWPipeline(plan, tasks, device=config.device)
        self.losses: list[torch.Tensor] = []
        self.chunks: list[Chunk] = []
        self.rows = RowCount()
        self._batches = self.job.batches(self.steps)

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next ``steps`` batches, or on as many as there are left.

        Args:
            steps: How many.
            on_step: Called after each.
            timed: These steps count when speed is told.

        Raises:
            TrainingDivergedError: A loss is not finite.
            MalformedRowError: A row is malformed, and the config is strict.
            ClickDataError: Not one good row has been met yet.
        """
        self._task_s.clear()
        before = len(self.losses)
        begin = time.perf_counter()
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            self.losses.append(ctx.loss.detach())
            self.rows.add(ctx)
            if on_step:
                on_step()
        self.pipe.device.synchronize()
        seconds = time.perf_counter() - begin
        done = len(self.losses) - before
        self.job.guard.check()
        if self.rows.lines and self.rows.malformed == self.rows.lines:
            raise ClickDataError(
                f"not one good row among {self.rows.lines}; the first: {self.rows.examples[0]}"
            )
        if done:
            self.chunks.append(Chunk(done, seconds, dict(self._task_s), timed))

    @property
    def timed(self) -> list[Chunk]:
        """The chunks that count when speed is told; all of them where none is said to."""
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
    def recent_loss(self) -> float:
        """Mean loss of the last 50 steps."""
        return float(torch.stack(self.losses[-50:]).mean())

    def _clocked(self, task: PipelineTask) -> PipelineTask:
        """The task, with the time of its calls added up. Only its own thread writes its sum."""
        fn, name, total = task.fn, task.name, self._task_s

        def clocked(ctx: IterContext) -> None:
            begin = time.perf_counter()
            fn(ctx)
            total[name] += time.perf_counter() - begin

        return PipelineTask(name, _named(clocked, fn), task.io, task.random)

    def close(self) -> None:
        """End the pipeline's threads."""
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _named(wrapper: TaskFn, fn: TaskFn) -> TaskFn:
    wrapper.__name__ = getattr(fn, "__name__", "task")
    return wrapper
