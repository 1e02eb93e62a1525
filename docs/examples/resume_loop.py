"""A job that is stopped in mid-epoch and started again, over a plain and over a stateful loader."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import swpipe

EPOCHS, SAVE_EVERY, CHECKPOINT = 3, 4, Path("checkpoint.pt")


class Rows(Dataset):
    """96 rows, and how many were read."""

    read = 0

    def __len__(self):
        return 96

    def __getitem__(self, index):
        self.read += 1
        return torch.full((4,), index / 96)


def train(make_loader, rows, seed, stop_after=None):
    """Run one process of the job, and return its losses by iteration."""
    torch.manual_seed(seed)
    loader = make_loader(rows, batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
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

    begin, losses = 0, {}
    with swpipe.overlap(loader, [decode, forward, backward, step], pull_ahead=True) as loop:
        if CHECKPOINT.exists():
            saved = torch.load(CHECKPOINT)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loop.load_state_dict(saved["loop"])
            begin = saved["epoch"]
        for epoch in range(begin, EPOCHS):
            for ctx in loop:
                losses[ctx.iter_idx] = ctx.loss.item()
                if ctx.iter_idx % SAVE_EVERY == SAVE_EVERY - 1:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    state |= {"loop": loop.state_dict(), "epoch": epoch}
                    torch.save(state, CHECKPOINT)
                if ctx.iter_idx == stop_after:
                    return losses
    return losses


for make_loader in (DataLoader, StatefulDataLoader):
    expected = train(make_loader, Rows(), seed=0)
    CHECKPOINT.unlink()

    train(make_loader, Rows(), seed=0, stop_after=45)
    rows = Rows()
    resumed = train(make_loader, rows, seed=1)  # the state has the random numbers
    assert resumed == {number: expected[number] for number in range(44, 72)}
    print(f"{make_loader.__name__}: from iteration {min(resumed)}; {rows.read} rows were read")
    CHECKPOINT.unlink()
