"""The same loop by a schedule: the next batch is copied while the model trains on this one."""

import time

import torch

from swpipe.schedulable import SchedulablePipeline


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
ahead = {"prefetch": True, "memcpy_stream": True, "threaded": True}
pipe = SchedulablePipeline.basic(model, optimizer, loss_fn=lambda y: y.square().mean(), **ahead)

total = 0.0
batches = iter(loader)
for _ in loader:
    loss = pipe.progress(batches).square().mean()
    total += loss.item()
print(f"mean loss {total / len(loader):.6f}")
pipe.shutdown()
