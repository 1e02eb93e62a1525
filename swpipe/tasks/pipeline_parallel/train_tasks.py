"""The tasks of a training step on a pipeline-parallel model.

The tasks read and write these attributes of the context::

    ctx.batch -- load --> inputs, target -- step --> losses, (gradients)
    (gradients) -- update --> (parameters)

States in parentheses are outside of the context: in the chunks and in the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.plans.pipeline_parallel.pipeline_training import LOAD, STEP, UPDATE
from swpipe.tasks.pipeline_parallel.pipeline_runtime import PipelineRuntime, SerialRuntime

Runtime: TypeAlias = PipelineRuntime | SerialRuntime


class PipelineTrainTasks:
    """The tasks load, step and update of a pipeline-parallel training step.

    Plans for these tasks are in ``swpipe.plans.pipeline_parallel.pipeline_training``. The step sets
    ``ctx.losses`` to ``StepResult.losses``.

    Args:
        runtime: The runtime that runs the schedule.
        optimizer: The optimizer of the parameters of the runtime's modules.
        load: Maps the loader's batch to (inputs, target) on the runtime's device. It runs ahead on
            another thread, and may use only its argument and state that nothing changes.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        load: Callable[[Any], tuple[tuple[Tensor, ...], Tensor]],
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._load = load

    def load(self, ctx: IterContext) -> None:
        """Set the inputs and the target of the whole batch."""
        ctx.inputs, ctx.target = self._load(ctx.batch)

    def step(self, ctx: IterContext) -> None:
        """Run the schedule's passes, and replace the gradients of the previous step."""
        ctx.losses = self._runtime.train(*ctx.inputs, target=ctx.target).losses

    def update(self, ctx: IterContext) -> None:
        """Update the parameters from their gradients."""
        self._optimizer.step()

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Return the three tasks in serial order."""
        modules = self._runtime.modules
        reads = DeclaredIO(state="parameters", mode="r", memory=list(modules))
        gradients = _gradients(p for module in modules for p in module.parameters())
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


def _gradients(parameters: Iterable[Tensor]) -> DeclaredIO:
    """Return a declaration of the parameters' gradients as a state."""
    # The list is made once, so that captured and restored gradients match by position.
    parameters = list(parameters)

    def restore(gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def capture() -> list[Tensor | None]:
        return [parameter.grad for parameter in parameters]

    return DeclaredIO(capture, restore, "gradients")
