"""A training step on a pipeline-parallel model, as tasks.

What goes through the context, attribute by attribute::

    ctx.batch -- load --> inputs, target -- step --> losses, (gradients)
    (gradients) -- update --> (parameters)

What stands in parentheses lies outside the context: in the chunks, in the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.plans.pipeline_parallel.pipeline_training import LOAD, STEP, UPDATE
from swpipe.tasks.pipeline_parallel.pipeline_runtime import PipelineRuntime, SerialRuntime
from swpipe.tasks.workload import gradients_of

Runtime: TypeAlias = PipelineRuntime | SerialRuntime


class PipelineTrainTasks:
    """Three tasks, for the plans of ``swpipe.plans.pipeline_parallel.pipeline_training`` or others.

    On each rank ``ctx.losses`` is what ``StepResult.losses`` says.

    Args:
        runtime: Runs the schedule.
        optimizer: Of the parameters of the runtime's modules.
        load: What the iterator gives to (inputs, target), on the runtime's device. It runs ahead,
            on another thread: it uses its argument and what nobody changes.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        load: Callable[[Any], tuple[tuple[Tensor, ...], Tensor]],
    ) -> None:
        self._runtime, self._optimizer, self._load = runtime, optimizer, load

    def load(self, ctx: IterContext) -> None:
        """Inputs and target of the whole batch."""
        ctx.inputs, ctx.target = self._load(ctx.batch)

    def step(self, ctx: IterContext) -> None:
        """The schedule's passes, in place of the gradients of the step before."""
        ctx.losses = self._runtime.train(*ctx.inputs, target=ctx.target).losses

    def update(self, ctx: IterContext) -> None:
        """Parameters, from the gradients."""
        self._optimizer.step()

    def tasks(self) -> tuple[PipelineTask, ...]:
        """In serial order."""
        reads = DeclaredIO(state="parameters", mode="r", memory=list(self._runtime.modules))
        gradients = gradients_of(self._runtime.modules, "gradients")
        updates = [
            DeclaredIO(state="gradients", mode="r"),
            DeclaredIO(state="parameters"),
            DeclaredIO(state="optimizer state"),
        ]
        return (
            PipelineTask(LOAD, self.load, pure=True),
            PipelineTask(STEP, self.step, io=[reads, gradients]),
            PipelineTask(UPDATE, self.update, io=updates),
        )
