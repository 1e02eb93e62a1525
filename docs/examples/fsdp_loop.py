"""A model that FSDP2 shards, over a loader that is pulled ahead.

Run it on several ranks with torchrun --nproc-per-node 2 fsdp_loop.py, or on one rank without
torchrun.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swpipe

alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
if "RANK" not in os.environ:
    os.environ.update(alone)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
for layer in (*model, model):
    if layer is not model[1]:
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.randn(40, 4))
sampler = DistributedSampler(rows)  # gives all ranks the same number of batches
loader = DataLoader(rows, batch_size=4, sampler=sampler, num_workers=1)


@swpipe.task(pure=True)
def decode(ctx):
    """Decode the batch; this task has no collective, and runs ahead on a separate thread."""
    ctx.x = ctx.batch[0] * 2


def forward(ctx):
    """Gather the shards; from here on, tasks run on the caller's thread, in order on all ranks."""
    ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    """Gather the shards again, and reduce the gradients."""
    ctx.loss.backward()


def step(ctx):
    """Update the shards of this rank."""
    optimizer.step()
    optimizer.zero_grad()


with swpipe.overlap(loader, [decode, forward, backward, step]) as loop:
    ahead = ["the loader", *loop.overlap.ahead]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = torch.tensor([ctx.loss.item() for ctx in loop])
        dist.all_reduce(losses)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, ahead: {', '.join(ahead)}; {len(losses)} batches per rank")
dist.destroy_process_group()
