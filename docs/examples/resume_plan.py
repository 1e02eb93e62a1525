"""A job over a hand-written plan that is stopped in mid-epoch, and goes on under another plan."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from swpipe import PipelinePlan, SWPipeline, task
from swpipe.loops import ResumableLoop
from swpipe.plans import prefetch_plan

EPOCHS, ACCUMULATE, CHECKPOINT = 3, 3, Path("checkpoint.pt")
SERIAL = PipelinePlan.serial(["decode", "forward", "backward", "step"])
AHEAD = prefetch_plan(["decode"], ["forward", "backward", "step"])


class Rows(Dataset):
    """40 rows, with random noise."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 40) + 0.1 * torch.rand(4)


def train(plan, seed, stop_after=None):
    """Run one process of the job, and return its losses by iteration."""
    torch.manual_seed(seed)
    loader = DataLoader(Rows(), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    @task(pure=True)
    def decode(ctx):
        ctx.x = ctx.batch - 0.5

    @task(random=True)  # dropout: the loader draws, too
    def forward(ctx):
        ctx.loss = (model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(ctx):
        (ctx.loss / ACCUMULATE).backward()

    def step(ctx):
        if ctx.iter_idx % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    tasks = [decode, forward, task(backward), task(step)]
    begin, losses = 0, {}
    with SWPipeline(plan, tasks) as pipe:
        loop = ResumableLoop(pipe, loader)
        if CHECKPOINT.exists():
            saved = torch.load(CHECKPOINT)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            for parameter, gradient in zip(model.parameters(), saved["gradients"], strict=True):
                parameter.grad = gradient
            loop.load_state_dict(saved["loop"])
            begin = saved["epoch"]
        for epoch in range(begin, EPOCHS):
            for ctx in loop:
                losses[ctx.iter_idx] = ctx.loss.item()
                state = {name: part.state_dict() for name, part in parts.items()}
                state["gradients"] = [parameter.grad for parameter in model.parameters()]
                state |= {"loop": loop.state_dict(), "epoch": epoch}
                torch.save(state, CHECKPOINT)
                if ctx.iter_idx == stop_after:
                    return losses
    return losses


expected = train(SERIAL, seed=0)
CHECKPOINT.unlink()
losses = train(AHEAD, seed=0, stop_after=12)
resumed = train(SERIAL, seed=1)
print(f"stopped after iteration {max(losses)}")
print(f"resumed from iteration {min(resumed)}; equal: {losses | resumed == expected}")
CHECKPOINT.unlink()
