"""A loop for the command line: swpipe profile --workload my_loop:loop."""

import time

import torch

from swpipe import task


def loop():
    """Return tasks in serial order, and batches: a list, a loader or a generator."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())

    @task(pure=True)
    def read(ctx):
        time.sleep(0.006)  # a disk
        ctx.x = ctx.batch - 0.5

    @task
    def train(ctx):
        optimizer.zero_grad()
        model(ctx.x).square().mean().backward()
        optimizer.step()
        time.sleep(0.008)  # a larger model

    return [read, train], [torch.rand(16, 8) for _ in range(40)]
