"""A job that a signal or its time limit ends after a whole step; started again, it goes on."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import swpipe
from swpipe.loops import StopRequest

EPOCHS, CHECKPOINT = 3, Path("checkpoint.pt")


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64) + torch.rand(4) / 10


def leave_group(worker):  # torchrun sends SIGTERM to a rank's whole process group
    os.setpgrp()


@swpipe.task(pure=True)
def decode(ctx):
    ctx.x = ctx.batch - 0.5


def train(rank, ranks):
    torch.manual_seed(rank)
    rows = Rows()
    sampler = DistributedSampler(rows, ranks, rank)
    loader = DataLoader(rows, 4, sampler=sampler, num_workers=1, worker_init_fn=leave_group)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        model(torch.zeros(1, 4)).sum().backward()  # DDP sums its first gradients in another order
    optimizer = torch.optim.Adam(model.parameters())

    def step(ctx):
        ctx.loss = (model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        ctx.loss.backward()
        optimizer.step()

    def save(epoch):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        state["loops"] = [loop.state_dict()]
        if dist.is_initialized():  # each rank has a state of its own
            state["loops"] = [None] * ranks
            dist.all_gather_object(state["loops"], loop.state_dict())
        if rank == 0:
            torch.save(state, "checkpoint.new")
            Path("checkpoint.new").replace(CHECKPOINT)

    first = 0
    with (
        swpipe.overlap(loader, [decode, step]) as loop,
        StopRequest(["SIGTERM", "SIGUSR1"], after_s=3500) as stop,
    ):
        if CHECKPOINT.exists():
            saved = torch.load(CHECKPOINT)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loop.load_state_dict(saved["loops"][rank % len(saved["loops"])])
            first = saved["epoch"]
        for epoch in range(first, EPOCHS):
            sampler.set_epoch(epoch)
            for ctx in stop.watch(loop):
                loss = ctx.loss.item()
            if stop.requested:
                save(epoch)
                print(f"rank {rank}: saved in epoch {epoch} ({stop.reason})")
                return
    print(f"rank {rank}: the last loss is {loss:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        train(0, 1)
