"""The tasks of an ordinary training step: ``SchedulablePipeline.basic``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swpipe._values.walk import map_tensors
from swpipe.core.messages import shown
from swpipe.schedulable.data_slot import BATCH, RESULT
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.slot_context import TaskContext
from swpipe.schedulable.stream_pool import DEFAULT


class TrainingStep:
    """One step of a model, in five tasks.

    Args:
        model: The model.
        optimizer: Its optimizer.
        device: Where the batches go.
        loss_fn: The loss from what the model returns; None if that is it, or has it.
        forward_fn: Called with model and batch instead of the model with the batch.
        backward_fn: Called with the loss instead of ``loss.backward()``.
        optimizer_step_fn: Called instead of ``optimizer.step()``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        loss_fn: Callable[[Any], Tensor] | None,
        forward_fn: Callable[[nn.Module, Any], Any] | None,
        backward_fn: Callable[[Tensor], Any] | None,
        optimizer_step_fn: Callable[[], Any] | None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._loss_of = loss_fn or loss_in
        self._forward_fn = forward_fn
        self._backward_fn = backward_fn or Tensor.backward
        self._step = optimizer_step_fn or optimizer.step

    def tasks(self, *, prefetch: bool, memcpy_stream: bool) -> tuple[Task, ...]:
        """The tasks, in the order of the plain loop."""
        return (
            Task.from_fn(
                "h2d",
                self._h2d,
                lookahead=int(prefetch),
                stream="memcpy" if memcpy_stream else DEFAULT,
                reads=[BATCH],
                writes=["batch_gpu"],
                pure=True,
            ),
            Task.from_fn("zero_grad", self._zero_grad),
            Task.from_fn("forward", self._forward, reads=["batch_gpu"], writes=["loss", RESULT]),
            Task.from_fn(
                "backward", self._backward, reads=["loss"], depends_on=["zero_grad"], nccl=True
            ),
            Task.from_fn("optimizer_step", self._optimizer_step, depends_on=["backward"]),
        )

    def _h2d(self, ctx: TaskContext) -> None:
        ctx.slots.set("batch_gpu", moved(ctx.slots[BATCH], self._device))

    def _zero_grad(self, ctx: TaskContext) -> None:
        self._optimizer.zero_grad()

    def _forward(self, ctx: TaskContext) -> None:
        batch = ctx.slots["batch_gpu"]
        forward = self._forward_fn
        output = self._model(batch) if forward is None else forward(self._model, batch)
        ctx.slots.set("loss", self._loss_of(output))
        ctx.slots.set(RESULT, output)

    def _backward(self, ctx: TaskContext) -> None:
        self._backward_fn(ctx.slots["loss"])

    def _optimizer_step(self, ctx: TaskContext) -> None:
        self._step()


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device: by its ``to``, or that of the tensors and objects within it."""

    def to(value: Any) -> Any:
        return value.to(device, non_blocking=True)

    return map_tensors(batch, to, own=to)


def loss_in(output: Any) -> Tensor:
    """The loss: what the model returned, its first entry, or its entry ``"loss"``.

    Raises:
        TypeError: There is none.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the model returned {shown(output)}, in which no loss is found: return the loss, a "
            'tuple that begins with it, or a dict with "loss"; or give basic() a loss_fn'
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
