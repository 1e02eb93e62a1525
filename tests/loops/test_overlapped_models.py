"""Models and steps that are compiled, in overlapped loops: the numbers of the plain loop.

Those that are sharded, or of DDP, are in ``even_jobs``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import IterContext


def train(what: str, ahead: bool) -> list[Any]:
    """Two epochs of a model with dropout; returns the losses and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    rows = torch.randn(38, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    apply: Any = torch.compile(model, backend="aot_eager") if what == "compiled" else model
    change = torch.compile(update, backend="aot_eager") if what == "compiled step" else update

    @swpipe.task(pure=True)
    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch[0] * 2

    def forward(ctx: Any) -> None:
        ctx.loss = apply(ctx.x).square().mean()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def step(ctx: Any) -> None:
        change()

    tasks = [decode, forward, backward, step]
    loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    losses = overlapped(loader, tasks) if ahead else plain(loader, tasks)
    return [losses, list(model.parameters()), torch.get_rng_state()]


def plain(loader: Any, tasks: list[Any]) -> list[Tensor]:
    """The losses of a plain loop."""
    losses = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            ctx = IterContext(batch, number)
            for task in tasks:
                task(ctx)
            losses.append(ctx.loss.detach())
    return losses


def overlapped(loader: Any, tasks: list[Any]) -> list[Tensor]:
    """The losses with one call more."""
    with swpipe.overlap(loader, tasks, pull_ahead=True, device="cpu") as loop:
        assert loop.overlap.ahead == ("decode",)
        return [ctx.loss.detach() for _ in range(2) for ctx in loop]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("what", ["compiled", "compiled step"])
def test_a_compiled_part_of_an_overlapped_loop(what: str) -> None:
    """What the compiler keeps is no state of the loop."""
    torch.testing.assert_close(train(what, ahead=True), train(what, ahead=False), rtol=0, atol=0)
