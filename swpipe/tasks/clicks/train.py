"""Train jobs under plans, and compare them: losses and parameters by bits, steps by time."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
    """

    steps: int
    seconds: float
    task_s: dict[str, float]

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
        chunks: What was run and timed so far.
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

    def advance(self, steps: int, on_step: Callable[[], object] | None = None) -> None:
        """Train on the next ``steps`` batches, or on as many as there are left.

        Args:
            steps: How many; 1 or more.
            on_step: Called after each.

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
        chunk = Chunk(len(self.losses) - before, time.perf_counter() - begin, dict(self._task_s))
        self.job.guard.check()
        if self.rows.lines and self.rows.malformed == self.rows.lines:
            raise ClickDataError(
                f"not one good row among {self.rows.lines}; the first: {self.rows.examples[0]}"
            )
        if chunk.steps:
            self.chunks.append(chunk)

    @property
    def steps_per_s(self) -> float:
        """Steps per second: the median over the timed chunks."""
        return 1 / statistics.median(chunk.step_s for chunk in self.chunks)

    @property
    def timed_steps(self) -> int:
        """Steps in the timed chunks."""
        return sum(chunk.steps for chunk in self.chunks)

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


# ------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run differs from another of the same config under another plan.

    Attributes:
        first_loss: The first step whose losses differ in any bit, from 0; None where none does.
        parameters: Names of parameters that differ in any bit.
    """

    first_loss: int | None
    parameters: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """All losses and all parameters are equal, bit for bit."""
        return self.first_loss is None and not self.parameters


def compare(a: TrainRun, b: TrainRun) -> Comparison:
    """Compare losses and parameters by bits.

    Raises:
        ValueError: The runs are not of the same length.
    """
    if len(a.losses) != len(b.losses):
        raise ValueError(
            f"{a.name} ran {len(a.losses)} steps and {b.name} {len(b.losses)}: run both alike first"
        )
    apart = (
        step
        for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True))
        if not torch.equal(x, y)
    )
    theirs = dict(b.job.model.named_parameters())
    parameters = tuple(
        name for name, mine in a.job.model.named_parameters() if not torch.equal(mine, theirs[name])
    )
    return Comparison(next(apart, None), parameters)


def alternate(
    runs: Sequence[TrainRun],
    steps: int,
    *,
    chunk: int = 50,
    warm_up: int = 10,
    on_step: Callable[[], object] | None = None,
) -> None:
    """Advance several runs by ``steps`` each, in turns.

    Turns are short and change their order, so that a machine that slows down, or that others use as
    well, does so for all of them alike. The first ``warm_up`` steps of each are not timed.
    """
    for run in runs:
        run.advance(min(warm_up, steps), on_step)
        if steps > warm_up:
            run.chunks.clear()
    for turn, done in enumerate(range(warm_up, steps, chunk)):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.advance(min(chunk, steps - done), on_step)


@dataclass(frozen=True, slots=True)
class Speed:
    """How a plan does against the serial run, and how it could do at best.

    Attributes:
        ratio: Steps per second over the serial run's.
        allowed: What the serial run's task times allow: their sum over the busiest thread group's.
    """

    ratio: float
    allowed: float

    @property
    def reached(self) -> float:
        """The part of what is allowed that was reached."""
        return self.ratio / self.allowed


def speed(serial: TrainRun, run: TrainRun) -> Speed:
    """Medians over the turns that the two took side by side.

    Task times are host times, so what they allow means something on a CPU only.
    """
    ratios, allowed = [], []
    for ours, theirs in zip(run.chunks, serial.chunks, strict=True):
        group_s: dict[str, float] = defaultdict(float)
        for name, entry in run.plan.schedule.items():
            group_s[entry.thread_group] += theirs.task_s[name]
        ratios.append(theirs.step_s / ours.step_s)
        allowed.append(sum(group_s.values()) / max(group_s.values()))
    if not ratios:
        return Speed(math.nan, math.nan)
    return Speed(statistics.median(ratios), statistics.median(allowed))
