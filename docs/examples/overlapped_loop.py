"""The same loop, with the loader on a separate thread."""

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
        return torch.full((8,), index / 160), torch.tensor(float(index > 80))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
criterion = torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(Rows(), batch_size=8, shuffle=True)


def train(ctx):
    x, y = ctx.batch
    x = (x - 0.5) / 0.3
    loss = criterion(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.008)  # a larger model
    ctx.loss = loss.detach()


loop = swpipe.overlap(loader, [train], pull_ahead=True)
for epoch in range(2):
    total = 0.0
    for ctx in loop:
        total += ctx.loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")
