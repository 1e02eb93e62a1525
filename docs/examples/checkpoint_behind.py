"""Checkpoints of torch.distributed that are written in the background, while training goes on.

Run it on several ranks with torchrun --nproc-per-node 2 checkpoint_behind.py, or on one rank
without torchrun.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import swpipe
from swpipe import on_caller

if "RANK" not in os.environ:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("gloo")
group = dist.new_group()  # of its own: the step's collectives have another
torch.manual_seed(dist.get_rank())
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(40)]
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
steps = iter(range(1, len(batches) + 1))


def step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    number = next(steps)
    if number % 10:
        return number, None
    return number, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(handed):
    number, state = handed
    if state is not None:
        dcp.save(state, checkpoint_id=f"checkpoints/{number}", process_group=group)
    return number


for number in swpipe.through(batches, on_caller(step, to_host=True), save):
    last = number

now = model.state_dict()
saved = {"model": {name: torch.zeros_like(value) for name, value in now.items()}}
dcp.load(saved, checkpoint_id="checkpoints/40", process_group=group)
same = all(torch.equal(saved["model"][name], value) for name, value in now.items())
if dist.get_rank() == 0:
    folders = sorted(path.name for path in Path("checkpoints").iterdir())
    print(last, "steps; checkpoints:", *folders, "- the last one is equal:", same)
dist.destroy_process_group()
