"""A training of a job by TorchRec's base pipeline or by ours, and its outcome."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.pipeline import borrowed
from swpipe.plans.torchrec.sparse_dist import ORDERED
from swpipe.tasks.torchrec import (
    MemoryOptions,
    PipelineFactory,
    SparseDistTasks,
    TaskOptions,
    TrainStep,
)
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from swpipe.tasks.torchrec.shuffling.shuffle import KarmarkarKarpShuffler
from tests.support.plans_for_tests import scattered
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import TrainPipelineBase

EXACT = (
    "jagged_sw_serial",
    "jagged_sparse_dist",
    "jagged_prefetch_sparse_dist",
    "jagged_split_sparse_dist",
)
"""Pipelines with the numbers of a plain loop."""

STALE = "jagged_semi_sync_sparse_dist"

ALL_MEMORY = MemoryOptions(
    enable_inplace_copy_batch=True, free_features_storage_early=True, clear_data_dist_inputs=True
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
        outputs: The model's output for each batch.
        state: Parameters at the end, those of the tables as far as this rank has them.
    """

    outputs: list[Tensor]
    state: dict[str, Tensor]

    def differences(self, other: Outcome) -> list[str]:
        """Return where two trainings differ in any bit."""
        found = [f"{len(self.outputs)} outputs, and {len(other.outputs)}"]
        if len(self.outputs) == len(other.outputs):
            pairs = zip(self.outputs, other.outputs, strict=True)
            found = [f"output {k}" for k, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        if self.state.keys() != other.state.keys():
            return [*found, "the names of the parameters"]
        mine, theirs = self.state, other.state
        return found + [name for name in mine if not torch.equal(mine[name], theirs[name])]


class Restarting(Iterator[Batch]):
    """An iterator of three batches that restarts, as with persistent workers."""

    def __init__(self) -> None:
        self._left = batches(3)

    def __next__(self) -> Batch:
        try:
            return next(self._left)
        except StopIteration:
            self._left = batches(3)
            raise


def to_the_end(pipeline: Any, data: Iterator[Batch]) -> list[Tensor]:
    """Return all outputs until StopIteration."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(data))
        except StopIteration:
            return outputs


def by_torchrec(job: Job, data: Iterator[Batch], model: nn.Module | None = None) -> Outcome:
    """Train a job by TorchRec's unpipelined pipeline."""
    model = sharded(job) if model is None else model
    pipeline = TrainPipelineBase(model, dense_optimizer(job, model), CPU)
    return Outcome(to_the_end(pipeline, data), everything(model))


def create(
    name: str,
    model: nn.Module | None = None,
    job: Job = Job(),  # noqa: B008 - frozen
    **options: Any,
) -> Any:
    """Return one of our pipelines, by default with the job's dense optimizer."""
    model = sharded(job) if model is None else model
    if not options.keys() & {"step", "optimizer"}:
        options["optimizer"] = dense_optimizer(job, model)
    return PipelineFactory.create(name, model=model, device=CPU, **options)


def outcome(pipeline: Any, data: Iterator[Any]) -> Outcome:
    """Train a pipeline on the data, and close it."""
    with pipeline:
        outputs = to_the_end(pipeline, data)
    return Outcome(outputs, everything(pipeline.tasks.model))


def refusal(fn: Callable[[], Any]) -> str:
    """Return the type and message of the exception that a call raises."""
    try:
        fn()
    except Exception as error:  # noqa: BLE001 - the test's to see
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def differences(
    job: Job, steps: int, names: tuple[str, ...] = EXACT, shuffled: bool = False, **options: Any
) -> dict[str, list[str]]:
    """Return the differences of our pipelines from TorchRec's base, if any."""
    wanted = by_torchrec(job, dealt(steps) if shuffled else batches(steps))
    found = {}
    for name in names:
        shuffler = KarmarkarKarpShuffler(Batch.work) if shuffled else None
        pipeline = create(name, job=job, shuffler=shuffler, **options)
        if where := outcome(pipeline, batches(steps)).differences(wanted):
            found[name] = where
        if shuffler is not None:
            shuffler.close()
    return found


def inferred_differences(
    job: Job, steps: int, seeds: tuple[int, ...], forward: Kind = "split"
) -> dict[int, list[str]]:
    """Return the differences of random plans with inferred dependences, if any.

    Each task is up to two milliseconds late, by a different time on each rank.
    """
    wanted = by_torchrec(job, batches(steps))
    inferred = _inferred(_tasks(job, forward)[0])
    found = {}
    for seed in seeds:
        tasks, model = _tasks(job, forward)
        draws = random.Random(100 * seed + dist.get_rank())
        with late_tasks(lambda _: draws.random() * 2e-3):  # noqa: B023 - used in the block
            late = tasks.tasks()
            with SWPipeline(scattered(inferred, seed), late, device=CPU) as pipe, borrowed(pipe):
                outputs = [ctx.output.detach() for ctx in pipe.iterate(batches(steps))]
        tasks.rewrite.detach()
        if where := Outcome(outputs, everything(model)).differences(wanted):
            found[seed] = where
    return found


def _tasks(job: Job, forward: Kind) -> tuple[SparseDistTasks, nn.Module]:
    model = sharded(job)
    step = TrainStep([dense_optimizer(job, model)])
    return SparseDistTasks(model, step, TaskOptions(forward=forward), device=CPU), model


def _inferred(tasks: SparseDistTasks) -> PipelinePlan:
    """Return the recording of two iterations on all ranks; collectives are ordered."""
    own = record(tasks.tasks(), next(iter(batches(1))), device=CPU)
    recordings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(recordings, replace(own, tasks=()))
    plan = own.together(recordings).plan()
    schedule = {
        name: replace(entry, globally_ordered=name in ORDERED)
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule, tasks=())


def dealt(steps: int) -> Iterator[Batch]:
    """Yield the batches as a shuffler returns them."""
    shuffler = KarmarkarKarpShuffler(Batch.work)
    for batch in batches(steps):
        yield shuffler.finish(batch, shuffler.start(batch))
    shuffler.close()


Late: TypeAlias = Callable[[str], float]
"""The seconds by which a task begins late, once for each run, by task."""


@contextmanager
def late_tasks(late: Late) -> Iterator[None]:
    """Delay the start of tasks within the block."""
    own = SparseDistTasks.tasks

    def delayed(task: PipelineTask) -> PipelineTask:
        def fn(ctx: Any) -> None:
            time.sleep(late(task.name))
            task.fn(ctx)

        return replace(task, fn=fn)

    def tasks(self: SparseDistTasks) -> tuple[PipelineTask, ...]:
        return tuple(delayed(task) for task in own(self))

    with mock.patch.object(SparseDistTasks, "tasks", tasks):
        yield
