"""The reference of pipeline-parallel training: a loop of plain torch, without swpipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """The loss and the output of each microbatch."""

    losses: Tensor
    outputs: list[Any]


class PlainLoop:
    """A loop that runs the microbatches of a batch one after the other, in one process.

    Args:
        modules: The chunks of the model, in the order of their stages.
        n_micro: The number of microbatches.
        loss_fn: (output, target) to a scalar.
    """

    def __init__(
        self, modules: Sequence[nn.Module], n_micro: int, loss_fn: Callable[[Any, Tensor], Tensor]
    ) -> None:
        self.modules = list(modules)
        self.n_micro = n_micro
        self.loss_fn = loss_fn

    def train(
        self, *inputs: Tensor, target: Tensor, accumulate: bool = False, **keywords: Tensor
    ) -> Step:
        """Compute the gradients of the mean loss; with ``accumulate``, add them to earlier ones."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        earlier = [None if p.grad is None else p.grad.clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        step = self._run(inputs, target, keywords, torch.autograd.backward)
        for parameter, before in zip(parameters, earlier, strict=True):
            if parameter.grad is not None:
                parameter.grad = parameter.grad / self.n_micro
            if accumulate and before is not None:
                new = torch.zeros_like(before) if parameter.grad is None else parameter.grad
                parameter.grad = before + new
        return step

    @torch.no_grad()
    def evaluate(self, *inputs: Tensor, target: Tensor, **keywords: Tensor) -> Step:
        """Compute losses and outputs without gradients."""
        return self._run(inputs, target, keywords, lambda loss: None)

    def _run(
        self,
        inputs: Sequence[Tensor],
        target: Tensor,
        keywords: dict[str, Tensor],
        backward: Callable[[Tensor], object],
    ) -> Step:
        size = len(target) // self.n_micro
        losses, outputs = [], []
        for micro in range(self.n_micro):
            rows = slice(micro * size, (micro + 1) * size)
            named = {name: tensor[rows] for name, tensor in keywords.items()}
            values: Any = [tensor[rows] for tensor in inputs]
            for module in self.modules:
                arguments = values if isinstance(values, list | tuple) else [values]
                values = module(*arguments, **named)
            loss = self.loss_fn(values, target[rows])
            backward(loss)
            losses.append(loss.detach())
            outputs.append(values)
        return Step(torch.stack(losses), outputs)
