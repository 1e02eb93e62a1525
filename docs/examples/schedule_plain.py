"""An ordinary loop, whose batches have to be copied to the device."""

import time

import torch


class Batch:
    """Numbers on the host, which take a while to copy."""

    def __init__(self, rows):
        self.rows = rows

    def to(self, device, non_blocking=True):
        time.sleep(0.004)
        return self.rows.to(device)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [Batch(torch.rand(16, 4)) for _ in range(40)]

total = 0.0
for batch in loader:
    x = batch.to("cpu")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
print(f"mean loss {total / len(loader):.6f}")
