"""The user's training step, in the parts that tasks call.

model -> (losses, output)
losses -> on_losses -> one number (/ accumulate) -> scaler -> backward
gradients -> finalize -> unscale -> clip -> optimizers, schedules
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from swpipe.core.messages import shown
from swpipe.tasks.torchrec._torchrec import FusedOptimizer
from swpipe.tasks.torchrec.step.per_token import PerToken


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The parts of a training step; a part that is None is skipped.

    Tables with a fused optimizer are updated inside backward, for every batch. The parts apply to
    all other parameters.

    Attributes:
        optimizers: Stepped in this order.
        forward: Called with the batch instead of the model, which it must call; returns (losses,
            output). Losses are a tensor, which is summed over its first dimension, or a dict of
            tensors, whose sums are added.
        on_losses: Transforms the losses before backward, e.g. to normalise by a count over all
            ranks. It may communicate.
        clip: Largest norm of all gradients together, or a function that clips the parameters'
            gradients.
        scaler: Scales the loss against underflow in float16.
        schedules: Stepped after the optimizers.
        accumulate: Batches per optimizer step. Their gradients are added, and DDP reduces them with
            the last batch only. Tables with a fused optimizer are updated by each batch.
        per_token: Counts tokens, and normalises and reports losses per token, in place of
            ``on_losses``, as the pipelines of recsys-examples do.
        sync_interval: Batches between two averages of the replicas of tables, after their update;
            None for never. Applies only if the model is TorchRec's ``DMPCollection``, whose
            pipelines call it ``dmp_collection_sync_interval_batches``.
        finalize: Called with the model before the optimizers, once per optimizer step, like
            Megatron's ``finalize_model_grads([model])``. DDP needs none. If it is None, Megatron's
            wrapper gets ``finish_grad_sync()``. It may communicate.
        watchdog: Called once for each batch, after everything else.

    Raises:
        ValueError: No optimizer is given, or ``accumulate`` or ``sync_interval`` is below 1.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    forward: Callable[[Any], Any] | None = None
    on_losses: Callable[[Any], Any] | None = None
    clip: float | Callable[[Sequence[nn.Parameter]], object] | None = None
    scaler: torch.amp.GradScaler | None = None
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    accumulate: int = 1
    sync_interval: int | None = 1
    finalize: Callable[[nn.Module], object] | None = None
    per_token: PerToken | None = None
    watchdog: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        # One optimizer may be given alone; Megatron's is no torch.optim.Optimizer.
        several = isinstance(self.optimizers, Iterable)
        optimizers = (*self.optimizers,) if several else (self.optimizers,)
        # The dataclass is frozen, so the normalised values are set around it.
        object.__setattr__(self, "optimizers", optimizers)
        object.__setattr__(self, "schedules", tuple(self.schedules))
        if not self.optimizers:
            raise ValueError("a TrainStep without an optimizer trains nothing: give one")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate!r}; give batches per step, 1 or more")
        every = self.sync_interval
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"sync_interval is {every!r}; give batches, 1 or more, or None")

    def fused(self) -> list[Any]:
        """Return the optimizers that are fused into tables, including those inside wrappers."""
        inner = (part for optimizer in self.optimizers for part in innermost(optimizer))
        return [optimizer for optimizer in inner if isinstance(optimizer, FusedOptimizer)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers update: no tables with a fused optimizer."""
        # Two optimizers, or a wrapper and its inner optimizer, may list a parameter twice. It must
        # be clipped once.
        fused = {id(parameter) for inner in self.fused() for parameter in _parameters(inner)}
        unique = {
            id(parameter): parameter
            for optimizer in self.optimizers
            for parameter in _parameters(optimizer)
            if id(parameter) not in fused and by_gradient(parameter)
        }
        return list(unique.values())

    def total(self, losses: Any) -> Tensor:
        """Return the scalar loss, before scaling.

        Raises:
            TypeError: The losses are neither a tensor nor a dict of tensors.
        """
        if isinstance(losses, Tensor):
            return torch.sum(losses, dim=0)
        parts = [*losses.values()] if isinstance(losses, Mapping) else []
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(
                f"the losses are {shown(losses)}; give a tensor or a dict of tensors "
                "(TrainStep.on_losses can convert them)"
            )
        # Not sum(), which would add the first loss to 0.
        return reduce(torch.add, (torch.sum(part, dim=0) for part in parts))

    def zero_grad(self) -> None:
        """Clear the gradients at the beginning of a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, which adds the gradients of the loss."""
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def update(self) -> None:
        """Clip the gradients and step the optimizers and schedules."""
        # The clipping norm refers to unscaled gradients, so all optimizers are unscaled first.
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if callable(self.clip):
            self.clip(self.parameters())
        elif self.clip is not None:
            clip_grad_norm_(self.parameters(), self.clip)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        # Once per step, after all optimizers: it adapts the scale to the overflows of all of them.
        if self.scaler is not None:
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def innermost(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers within TorchRec's wrappers, those that are fused into tables as well."""
    if isinstance(optimizer, FusedOptimizer):
        yield optimizer
    elif hasattr(optimizer, "optimizers"):  # TorchRec's CombinedOptimizer: (key, optimizer)
        for _, inner in optimizer.optimizers:
            yield from innermost(inner)
    elif hasattr(optimizer, "_optimizer"):  # TorchRec's wrappers: warm-up, clipping
        yield from innermost(optimizer._optimizer)
    else:
        yield optimizer


def by_gradient(parameter: Tensor) -> bool:
    """Return whether an optimizer step updates the parameter, rather than a fused backward."""
    # The private attribute that torch's _apply_optimizer_in_backward sets, and TorchRec on tables
    # with a fused optimizer.
    return parameter.requires_grad and not hasattr(parameter, "_in_backward_optimizers")
