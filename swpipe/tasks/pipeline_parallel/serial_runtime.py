"""The same steps in a single process: what a pipeline's numbers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.tasks.pipeline_parallel.pipeline_runtime import LossFn, StepResult
from swpipe.tasks.pipeline_parallel.run_rules import check_batch


class SerialRuntime:
    """Train and evaluate a whole model, microbatch after microbatch.

    Gradients are those of the mean over microbatches of their loss.

    Args:
        chunks: The model's chunks, in the order of their stages; or the model, alone.
        n_micro: The number of microbatches.
        loss_fn: (output, target) to a scalar, for one microbatch.
    """

    def __init__(self, chunks: Sequence[nn.Module], n_micro: int, loss_fn: LossFn) -> None:
        self.modules, self.n_micro, self._loss_fn = tuple(chunks), n_micro, loss_fn

    def train(self, *inputs: Tensor, target: Tensor, with_output: bool = False) -> StepResult:
        """Run one batch; its gradients replace those of the model.

        Arguments as of ``PipelineRuntime.train``.

        Raises:
            ValueError: The microbatches do not divide the batch.
        """
        for chunk in self.modules:
            chunk.zero_grad(set_to_none=True)
        result = self._run(inputs, target, with_output, backward=True)
        for parameter in (p for chunk in self.modules for p in chunk.parameters()):
            if parameter.grad is not None:
                parameter.grad.div_(self.n_micro)
        return result

    def evaluate(self, *inputs: Tensor, target: Tensor, with_output: bool = False) -> StepResult:
        """The forward passes alone, without gradients."""
        with torch.no_grad():
            return self._run(inputs, target, with_output, backward=False)

    def _run(
        self, inputs: tuple[Tensor, ...], target: Tensor, with_output: bool, *, backward: bool
    ) -> StepResult:
        tensors = check_batch(inputs, target, self.n_micro).values()
        losses, outputs = [], []
        for *micro, wanted in zip(*(one.chunk(self.n_micro) for one in tensors), strict=True):
            output: Any = tuple(micro)
            for chunk in self.modules:
                output = chunk(*output) if isinstance(output, tuple) else chunk(output)
            loss: Any = self._loss_fn(output, wanted)
            if backward:
                loss.backward()
            losses.append(loss.detach())
            if with_output:
                outputs.append(output.detach())
        return StepResult(torch.stack(losses), torch.cat(outputs) if with_output else None)
