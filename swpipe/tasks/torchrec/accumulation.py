"""Gradients of several batches for one optimizer step.

    trained batch      0     1     2     3     4     5   end of the data
    zero gradients     ^                 ^                 ^
    reduce (DDP)       ^           ^           !     ^
    optimizer step                 ^                 ^         with accumulate=3, and so on;
                                                               an unfinished one at the end: flush

As with TorchRec's ``GradientAccumulationWrapper``, gradients are added, not averaged: a table with
a fused optimizer is updated by each batch, inside its backward, and must move as far as without
accumulation. DDP reduces with the last batch only, and in the first one of all, in which it records
its static graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swpipe.tasks.torchrec.wrappers import ddp_modules


class Accumulation:
    """Which batches begin and end an optimizer step; batches are given by their iteration."""

    def __init__(self, model: nn.Module, batches: int) -> None:
        self.batches = batches
        self._ddp = tuple(ddp_modules(model)) if batches > 1 else ()
        self._origin = 0  # the iteration that would be the first of a step
        self._first: int | None = None

    def begins(self, iteration: int) -> bool:
        """Whether the batch is the first of a step."""
        return (iteration - self._origin) % self.batches == 0

    def ends(self, iteration: int) -> bool:
        """Whether it is the last."""
        return (iteration + 1 - self._origin) % self.batches == 0

    def skip(self) -> None:
        """Do not count a batch that is not trained on, since it is one of an evaluation."""
        self._origin += 1

    def set_reduction(self, iteration: int, *, trains: bool) -> None:
        """Before a forward: let DDP reduce the gradients in its backward, or not."""
        if trains and self._first is None:
            self._first = iteration
        for module in self._ddp:  # as DDP's no_sync(), for one forward
            module.require_backward_grad_sync = self.ends(iteration) or iteration == self._first

    def rest(self, next_iteration: int) -> int:
        """How many batches a last, unfinished step has accumulated."""
        return (next_iteration - self._origin) % self.batches

    def restart(self, next_iteration: int) -> None:
        """Begin a step with this batch, without gradients of others.

        Warns:
            RuntimeWarning: As ``warn_of_rounding``.
        """
        self._origin = next_iteration
        if next_iteration and self._first is None:
            warn_of_rounding(self._ddp, self.batches)

    def take_rest(self, next_iteration: int) -> bool:
        """Reduce what a last, unfinished step has accumulated; False if there is none.

        A collective of the model's ranks. The next batch begins a new step.
        """
        rest = self.rest(next_iteration)
        self._origin += rest
        if rest:
            for module in self._ddp:
                _reduce(module)
        return rest > 0


def warn_of_rounding(modules: Iterable[DistributedDataParallel], batches: int) -> None:
    """Warn of the first step with an accumulation after a resume.

    Warns:
        RuntimeWarning: Its sums are rounded otherwise than without a stop.
    """
    if any(dist.get_world_size(module.process_group) > 1 for module in modules):
        warnings.warn(
            "DDP reduces the first batch of a process by itself, so the first step that "
            f"accumulates the gradients of {batches} batches after a resume may differ in the last "
            "bits from that of a run that was not stopped",
            RuntimeWarning,
            stacklevel=2,
        )


def _reduce(module: DistributedDataParallel) -> None:
    """Average the gradients over the ranks, as DDP does within a backward."""
    group = module.process_group
    parameters = [
        parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    ]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = used.to(module.device)
    dist.all_reduce(used, group=group)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(1.0 / dist.get_world_size(group))
            dist.all_reduce(parameter.grad, group=group)
