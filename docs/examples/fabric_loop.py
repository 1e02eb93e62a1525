"""Fabric's accumulation and clipping over a loader that is pulled ahead."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe

torch.manual_seed(0)
fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
rows = TensorDataset(torch.randn(40, 4))
loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=4, shuffle=True))
steps = []


@swpipe.task(pure=True)
def decode(ctx):
    """Decode the batch; this task runs ahead, on a separate thread."""
    ctx.x = ctx.batch[0] * 2


def forward(ctx):
    """Compute the loss; this task and all later ones run on the caller's thread."""
    ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    """Add to the gradients of four batches."""
    with fabric.no_backward_sync(model, enabled=(ctx.iter_idx + 1) % 4 != 0):
        fabric.backward(ctx.loss / 4)


def step(ctx):
    """Update the parameters in every fourth iteration."""
    if (ctx.iter_idx + 1) % 4 == 0:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(ctx.iter_idx)


with swpipe.overlap(loader, [decode, forward, backward, step], pull_ahead=True) as loop:
    print("ahead: the loader,", *loop.overlap.ahead)
    for epoch in range(2):
        losses = [ctx.loss.item() for ctx in loop]
        print(f"epoch {epoch}: {len(losses)} batches, steps at {steps}")
