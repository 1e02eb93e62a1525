"""A plain loop, and the same loop overlapped: the same losses, bit for bit."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

import swpipe


class Rows(Dataset):
    """Rows that take a while to read."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.001)  # a disk, a network
        return torch.full((8,), index / 160)


def make():
    """Return the usual parts of a training loop, as four functions."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())

    @swpipe.task(pure=True)
    def decode(ctx):
        ctx.x = ctx.batch - 0.5

    def forward(ctx):
        ctx.loss = (model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(ctx):
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx):
        optimizer.step()
        time.sleep(0.008)  # a larger model

    return decode, forward, backward, step


tasks = make()
plain = []
begin = time.perf_counter()
for i, batch in enumerate(DataLoader(Rows(), batch_size=8, shuffle=True)):
    ctx = swpipe.IterContext(batch, i)
    for task in tasks:
        task(ctx)
    plain.append(ctx.loss.item())
plain_s = time.perf_counter() - begin

tasks = make()
loader = DataLoader(Rows(), batch_size=8, shuffle=True)
with swpipe.overlap(loader, tasks, pull_ahead=True) as loop:
    print(loop.overlap)
    begin = time.perf_counter()
    overlapped = [ctx.loss.item() for ctx in loop]
    overlapped_s = time.perf_counter() - begin

assert overlapped == plain
print(f"plain {plain_s:.2f} s, overlapped {overlapped_s:.2f} s")
