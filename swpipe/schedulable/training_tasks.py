"""The tasks of an ordinary training step, which ``SchedulablePipeline.basic`` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.core.messages import shown
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.slot_context import BATCH, RESULT, TaskContext
from swpipe.values import map_tensors


def training_tasks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    loss_fn: Callable[[Any], Tensor] | None,
    forward_fn: Callable[[nn.Module, Any], Any] | None,
    backward_fn: Callable[[Tensor], Any] | None,
    optimizer_step_fn: Callable[[], Any] | None,
    prefetch: bool,
    stream: str,
) -> tuple[Task, ...]:
    """Return the five tasks of a training step in serial order; the copy runs on ``stream``."""

    def h2d(ctx: TaskContext) -> None:
        ctx.slots.set("batch_gpu", moved(ctx.slots[BATCH], device))

    def forward(ctx: TaskContext) -> None:
        batch = ctx.slots["batch_gpu"]
        output = model(batch) if forward_fn is None else forward_fn(model, batch)
        ctx.slots.set("loss", (loss_fn or loss_in)(output))
        # ``progress`` returns this slot.
        ctx.slots.set(RESULT, output)

    def backward(ctx: TaskContext) -> None:
        (backward_fn or Tensor.backward)(ctx.slots["loss"])

    step = optimizer_step_fn or optimizer.step
    return (
        Task.from_fn(
            "h2d",
            h2d,
            lookahead=int(prefetch),
            stream=stream,
            reads=BATCH,
            writes="batch_gpu",
            # The copy touches only its batch, so the engine may run it ahead of undeclared tasks.
            pure=True,
        ),
        # The gradients are no slot: dependences keep zero_grad, backward and step in order.
        Task.from_fn("zero_grad", lambda ctx: optimizer.zero_grad()),
        Task.from_fn("forward", forward, reads="batch_gpu", writes=["loss", RESULT]),
        # DDP reduces gradients during backward, so ranks must submit it in the same order.
        Task.from_fn("backward", backward, reads="loss", depends_on="zero_grad", nccl=True),
        Task.from_fn("optimizer_step", lambda ctx: step(), depends_on="backward"),
    )


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device, moved by ``to`` of the batch or of the values in it."""

    def to(value: Any) -> Any:
        # ``non_blocking`` lets a pinned batch be copied while the host continues.
        return value.to(device, non_blocking=True)

    return map_tensors(batch, to, own=to)


def loss_in(output: Any) -> Tensor:
    """Return the loss in the model's output: the output, its first entry, or its entry "loss".

    Raises:
        TypeError: The output contains no tensor at this place.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the model returned {shown(output)}, in which no loss is found: return the loss, a "
            'tuple that begins with it, or a dict with "loss"; or give basic() a loss_fn'
        )
    return loss
