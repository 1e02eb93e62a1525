"""Accelerate's gradient accumulation over a loader that is pulled ahead, with the same steps."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import swpipe

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.randn(40, 4))
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


@swpipe.task(pure=True)
def decode(ctx):
    """Decode the batch; this task runs ahead, on a separate thread."""
    ctx.x = ctx.batch[0] * 2


def forward(ctx):
    """Compute the loss; this task and all later ones run on the caller's thread."""
    with accelerator.accumulate(model):
        ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    """Compute the gradients."""
    accelerator.backward(ctx.loss)


def step(ctx):
    """Update the parameters in every fourth iteration, and in the last of each epoch."""
    optimizer.step()
    optimizer.zero_grad()


with swpipe.overlap(loader, [decode, forward, backward, step]) as loop:
    print("ahead: the loader,", *loop.overlap.ahead)
    for epoch in range(2):
        steps = [ctx.iter_idx for ctx in loop if accelerator.sync_gradients]
        print(f"epoch {epoch}: steps at {steps}")
