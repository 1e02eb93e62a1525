"""A drop-in for TorchRec's train pipelines: ``progress(dataloader_iter)``.

    pipeline = PipelineFactory.create(
        "jagged_prefetch_sparse_dist", model=model, optimizer=optimizer, device=device
    )
    while True:
        try:
            output = pipeline.progress(iterator)
        except StopIteration:
            break

As with TorchRec, it returns the model's output (the second of ``(losses, output)``) of the oldest
batch; raises StopIteration at the end, and on every later call; continues with another iterator
after the batches in flight; and treats None as the end of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.device import Device
from swpipe.pipeline import SWPipeline
from swpipe.plans import sparse_dist as plans
from swpipe.tasks.sparse_dist.rewrite import RewriteReport
from swpipe.tasks.sparse_dist.step import TrainStep
from swpipe.tasks.sparse_dist.task_set import SparseDistTasks


class _Feed(Iterator[Any]):
    """One iterator for the pipeline over the iterators that the user passes one after another."""

    def __init__(self) -> None:
        self._source: Iterator[Any] | None = None
        self.exhausted = True

    def take_from(self, source: Iterator[Any]) -> None:
        """Continue with another iterator; an exhausted one is not used again."""
        if source is not self._source:
            self._source = source
            self.exhausted = False

    def __next__(self) -> Any:
        batch = None if self.exhausted or self._source is None else next(self._source, None)
        if batch is None:
            self.exhausted = True
            raise StopIteration
        return batch


class SparseDistPipeline:
    """Trains a model under one plan, with TorchRec's ``progress``.

    Use it as a context manager, or call ``close``. Between two calls of ``progress`` the model may
    be detached, evaluated and saved, if the plan uses no worker threads (ready-made ones do not).

    Args:
        tasks: The tasks of the step.
        plan: The plan.
        stall_timeout_s: Seconds without progress after which ``StallError`` is raised; None: never.
        seed: Seed of the draws of a random model; None for ``torch.initial_seed()``.

    Attributes:
        tasks: As given.
        pipe: The underlying pipeline: for traces, shortcuts and the profiler.
    """

    def __init__(
        self,
        tasks: SparseDistTasks,
        plan: PipelinePlan,
        *,
        stall_timeout_s: float | None = 600.0,
        seed: int | None = None,
    ) -> None:
        self.tasks = tasks
        self.pipe = SWPipeline(
            plan, tasks.tasks(), device=tasks.device, stall_timeout_s=stall_timeout_s, seed=seed
        )
        self._feed = _Feed()

    @property
    def report(self) -> RewriteReport | None:
        """Which modules are pipelined; None before the first batch."""
        return self.tasks.rewrite.report

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Attach the model, train on one more batch, and return the oldest batch's output.

        Raises:
            StopIteration: All batches are done.
            BaseException: As ``SWPipeline.progress``.
        """
        self.attach()
        self._feed.take_from(dataloader_iter)
        while True:
            try:
                return self.pipe.progress(self._feed).output
            except StopIteration:
                if self._feed.exhausted:
                    raise
                # The run of the previous iterator has ended: start one with this.

    def detach(self) -> nn.Module:
        """Restore and return the model, for evaluation, a checkpoint or other code.

        Batches in flight are kept for ``attach`` or the next ``progress``. They use parameters that
        are loaded meanwhile, except embeddings that the plan has already looked up.
        """
        self.tasks.rewrite.detach()
        return self.tasks.model

    def attach(self) -> None:
        """Undo ``detach``."""
        self.tasks.rewrite.attach()

    def close(self) -> None:
        """Drop the batches in flight and restore the model. The pipeline cannot be used again."""
        self.pipe.close()
        self.tasks.rewrite.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


PlanFor: TypeAlias = Callable[[SparseDistTasks], PipelinePlan]
Builder: TypeAlias = Callable[..., Any]


def build(
    plan: PipelinePlan | PlanFor,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: Device | torch.device | str | None = None,
    step: TrainStep | None = None,
    stall_timeout_s: float | None = 600.0,
    seed: int | None = None,
    **options: Any,
) -> SparseDistPipeline:
    """A ``SparseDistPipeline``.

    ``plan`` is the plan, or a function that makes one for the tasks. ``optimizer``, one or several,
    stands for ``TrainStep(optimizer)``; give either that or ``step``. The other arguments are those
    of ``SparseDistTasks`` and ``SparseDistPipeline``.

    Raises:
        ValueError: Both an optimizer and a step, or neither.
    """
    if (optimizer is None) == (step is None):
        raise ValueError("give either optimizer= or step=TrainStep(...), which has its own")
    if step is None:
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        step = TrainStep([one for one in several if one is not None])
    tasks = SparseDistTasks(model, step, device=device, **options)
    made = plan(tasks) if callable(plan) else plan
    return SparseDistPipeline(tasks, made, stall_timeout_s=stall_timeout_s, seed=seed)


class PipelineFactory:
    """A registry of pipelines by name."""

    _builders: ClassVar[dict[str, Builder]] = {}

    @classmethod
    def register(cls, name: str, builder: Builder) -> None:
        """Register a new name; ``builder`` gets the other arguments of ``create``."""
        if name in cls._builders:
            raise ValueError(f"pipeline {name!r} is registered already: choose another name")
        cls._builders[name] = builder

    @classmethod
    def create(cls, name: str, **arguments: Any) -> Any:
        """The pipeline of that name; those registered here take the arguments of ``build``."""
        if name not in cls._builders:
            raise ValueError(f"no pipeline is named {name!r}; there are {', '.join(cls.list())}")
        return cls._builders[name](**arguments)

    @classmethod
    def list(cls) -> list[str]:
        """All names, sorted."""
        return sorted(cls._builders)


def _semi_sync(tasks: SparseDistTasks) -> PipelinePlan:
    if tasks.tables_in_step:
        raise ValueError(
            "semi_sync looks up the next batch before this one's backward, which data-parallel "
            "tables and those that the optimizers step do not allow: shard them otherwise, with a "
            "fused optimizer, or take jagged_split_sparse_dist"
        )
    return plans.semi_sync()


_PLANS: dict[str, PipelinePlan | PlanFor] = {
    "jagged_sw_serial": plans.serial(),
    "jagged_sparse_dist": plans.sparse_dist(),
    "jagged_prefetch_sparse_dist": plans.prefetch(),
    "jagged_split_sparse_dist": lambda tasks: plans.split(tables_in_step=tasks.tables_in_step),
    "jagged_semi_sync_sparse_dist": _semi_sync,
}
for _name, _plan in _PLANS.items():
    PipelineFactory.register(_name, partial(build, _plan))
