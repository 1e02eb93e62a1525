"""Loops of Accelerate and Fabric, as their documentation writes them, and a plain run of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import accelerate
import lightning
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import IterContext

ROWS = 38
EPOCHS = 2
MIDDLE = 4
STEPS = [3, 7, 9, 13, 17, 19]


def network() -> nn.Module:
    """A model with random numbers of its own."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))


def loaders(rows: int = ROWS, **options: Any) -> list[DataLoader[Any]]:
    """For training and for evaluation; the last batches are smaller."""
    data = TensorDataset(torch.randn(rows, 4))
    return [DataLoader(data, batch_size=4, shuffle=True, **options), DataLoader(data, batch_size=8)]


@swpipe.task(pure=True)
def decode(ctx: Any) -> None:
    """The part that needs no model."""
    ctx.x = ctx.batch[0] * 2


def declared(tasks: list[Any]) -> list[swpipe.PipelineTask]:
    """Functions as tasks; tasks as they are."""
    return [one if isinstance(one, swpipe.PipelineTask) else swpipe.task(one) for one in tasks]


class OfAccelerate:
    """As its documentation writes a loop."""

    def __init__(self, rows: int = ROWS, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.loader: Any
        if "gradient_accumulation_plugin" not in options:
            options["gradient_accumulation_steps"] = 4
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.scheduler, self.loader, self.rows = (
            self.accelerator.prepare(model, optimizer, scheduler, *loaders(rows))
        )
        self.steps: list[int] = []
        self.tasks = [decode, self.forward, self.backward, self.step]

    def forward(self, ctx: Any) -> None:
        with self.accelerator.accumulate(self.model):
            ctx.loss = self.model(ctx.x).square().mean()

    def backward(self, ctx: Any) -> None:
        self.accelerator.backward(ctx.loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self, ctx: Any) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def body(self, ctx: Any) -> Any:
        """What the loop asks for after the tasks: all of it may differ by iteration."""
        if self.accelerator.sync_gradients:
            self.steps.append(ctx.iter_idx)
        state = self.accelerator.gradient_state
        return [
            *(state.in_dataloader, state.end_of_dataloader, state.remainder),
            self.accelerator.gather_for_metrics(ctx.x).clone(),
            self.optimizer.param_groups[0]["lr"],
        ]

    def evaluate(self) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            found = [self.accelerator.gather_for_metrics(self.model(b)) for (b,) in self.rows]
        self.model.train()
        return found


class OfFabric:
    """With its wrappers of the model, the optimizer and the loaders."""

    def __init__(self) -> None:
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        self.fabric.launch()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader, self.rows = self.fabric.setup_dataloaders(*loaders())  # type: ignore[misc]
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.tasks = [decode, self.forward_backward, self.step]

    def forward_backward(self, ctx: Any) -> None:
        with self.fabric.no_backward_sync(self.model, enabled=(ctx.iter_idx + 1) % 4 != 0):
            ctx.loss = self.model(ctx.x).square().mean()
            self.fabric.backward(ctx.loss / 4)

    def step(self, ctx: Any) -> None:
        if (ctx.iter_idx + 1) % 4 == 0:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def body(self, ctx: Any) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    def evaluate(self) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(batch) for (batch,) in self.rows]
        self.model.train()
        return found


def train(loop: Any, passes: Iterator[Any]) -> list[Any]:
    """The body of both runs; returns all numbers that they show."""
    seen = []
    for contexts in passes:
        for ctx in contexts:
            seen.append([ctx.loss.detach(), loop.body(ctx)])
            if ctx.iter_idx % 10 == MIDDLE:
                seen.append(loop.evaluate())
    return [seen, loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state()]


def plainly(loop: Any) -> list[Any]:
    """As the tool's own users do."""
    numbers = count()

    def contexts() -> Iterator[Any]:
        for batch in loop.loader:
            ctx = IterContext(batch, next(numbers))
            for function in loop.tasks:
                function(ctx)
            yield ctx

    return train(loop, (contexts() for _ in range(EPOCHS)))
