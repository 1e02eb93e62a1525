"""The user's own training step, as parts: what makes the loss, and what becomes of the gradients.

model -> (losses, output)
losses -> on_losses -> one number (/ accumulate) -> scaler -> backward
gradients -> finalize -> unscale -> clip -> optimizers, schedules
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The parts of a step. What is None is left out.

    Tables with a fused optimizer update themselves inside backward, for every batch, whatever is
    said here; the parts concern all other parameters.

    Attributes:
        optimizers: Stepped in this order.
        forward: Called with the batch in place of the model: must call it, and return (losses,
            output). Losses are a tensor, of which the sum over its first dimension is taken, or a
            dict of such, which are added up in its order.
        on_losses: Losses to those that are differentiated: the place to all-reduce them for a log,
            or to normalise them by a count over all ranks. It may communicate.
        clip: Largest norm of all gradients together, or a function of the parameters that clips.
        scaler: Scales the loss against underflow in float16.
        schedules: Stepped after the optimizers.
        accumulate: Batches per optimizer step; the loss is divided by it, and DDP reduces gradients
            with the last of them only. Counted by the iteration's number.
        finalize: Called with the model between backward and the optimizers, once per optimizer
            step: the hook for Megatron's ``finalize_model_grads([model])``. DDP needs none. It may
            communicate.

    Raises:
        ValueError: No optimizer, or ``accumulate`` below 1.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    forward: Callable[[Any], Any] | None = None
    on_losses: Callable[[Any], Any] | None = None
    clip: float | Callable[[Sequence[nn.Parameter]], object] | None = None
    scaler: torch.amp.GradScaler | None = None
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    accumulate: int = 1
    finalize: Callable[[nn.Module], object] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizers", tuple(self.optimizers))
        object.__setattr__(self, "schedules", tuple(self.schedules))
        if not self.optimizers:
            raise ValueError("a TrainStep without an optimizer trains nothing: give one")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate!r}; give batches per step, 1 or more")

    def begins(self, iteration: int) -> bool:
        """Whether gradients begin anew with this iteration."""
        return iteration % self.accumulate == 0

    def ends(self, iteration: int) -> bool:
        """Whether the optimizers step with this iteration."""
        return (iteration + 1) % self.accumulate == 0

    def parameters(self) -> list[nn.Parameter]:
        """What optimizers update by gradients: all but tables with a fused optimizer."""
        unique = {
            id(parameter): parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if by_gradient(parameter)
        }
        return list(unique.values())

    def total(self, losses: Any) -> Tensor:
        """The one number that is differentiated, before scaling.

        Raises:
            TypeError: The losses are neither a tensor nor a dict of tensors.
        """
        parts = list(losses.values()) if isinstance(losses, Mapping) else [losses]
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(
                f"the losses are {_kinds(losses)}; give a tensor, or a dict of tensors that are "
                "added up (TrainStep.on_losses can turn anything into that)"
            )
        total: Tensor = torch.sum(parts[0], dim=0)
        for part in parts[1:]:
            total = total + torch.sum(part, dim=0)
        return total if self.accumulate == 1 else total / self.accumulate

    def backward(self, loss: Tensor, iteration: int) -> None:
        """Gradients of the loss, on top of those that are accumulated."""
        if self.begins(iteration):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def update(self, iteration: int) -> None:
        """Step everything that steps, if this iteration ends an accumulation."""
        if not self.ends(iteration):
            return
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
        if self.scaler is not None:
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()


def by_gradient(parameter: Tensor) -> bool:
    """Whether an optimizer updates a parameter; a fused one is updated inside backward."""
    return parameter.requires_grad and not hasattr(parameter, "_in_backward_optimizers")


def ddp_modules(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Every DDP wrapper, those that TorchRec puts around data-parallel tables included."""
    return (m for m in model.modules() if isinstance(m, DistributedDataParallel))


def _kinds(losses: Any) -> str:
    if isinstance(losses, Mapping):
        return f"a dict of {', '.join(type(v).__name__ for v in losses.values()) or 'nothing'}"
    return f"a {type(losses).__name__}"
