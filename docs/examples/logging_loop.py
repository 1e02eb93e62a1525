"""Logs of an overlapped loop: its body logs losses, an observer measures the tasks' times."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe.trace import Observer

EVERY = 5


class Writer:
    """A log in memory; any object with ``add_scalar(tag, value, step)`` can replace it."""

    def __init__(self):
        self.steps = {}

    def add_scalar(self, tag, value, step):
        """Note the step, as TensorBoard's SummaryWriter does; that also stores the value."""
        assert isinstance(value, float)
        self.steps.setdefault(tag, []).append(step)


class TaskTimes(Observer):
    """The time that each task took, by iteration.

    An observer is called on the thread that runs the task, also for iterations that the loop's body
    gets later. Therefore it keeps the times, and the body writes them.
    """

    def __init__(self):
        self._began = {}
        self._took_ms = {}

    def start(self, ins, iteration):
        """Note when a task starts."""
        self._began[ins.task, iteration] = time.perf_counter()

    def stop(self, ins, iteration, exists=True):
        """Note how long a task took; ``exists`` is false at the end of the data."""
        took_ms = 1e3 * (time.perf_counter() - self._began.pop((ins.task, iteration)))
        if exists:
            self._took_ms.setdefault(iteration, {})[ins.task.strip("<>")] = took_ms

    def pop(self, iteration):
        """Return the times of all tasks of an iteration, which the body has got."""
        return self._took_ms.pop(iteration)


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.randn(48, 4))
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1)


@swpipe.task(pure=True)
def decode(ctx):
    """Decode the batch; this task runs ahead, on a separate thread."""
    ctx.x = ctx.batch[0] * 2


def forward(ctx):
    """Compute the loss; this task and all later ones run on the caller's thread."""
    ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    """Compute the gradients."""
    optimizer.zero_grad()
    ctx.loss.backward()


def step(ctx):
    """Update the parameters."""
    optimizer.step()


writer, times = Writer(), TaskTimes()
with swpipe.overlap(loader, [decode, forward, backward, step]) as loop, loop.pipe.observe(times):
    total = torch.zeros(())
    for _epoch in range(2):
        for ctx in loop:
            total += ctx.loss.detach()  # does not wait for the device
            took_ms = times.pop(ctx.iter_idx)
            if ctx.iter_idx % EVERY == EVERY - 1:
                writer.add_scalar("loss", (total / EVERY).item(), ctx.iter_idx)  # waits for it
                total.zero_()
                for name, ms in took_ms.items():
                    writer.add_scalar(f"ms/{name}", ms, ctx.iter_idx)

for tag, steps in sorted(writer.steps.items()):
    print(f"{tag:12} at steps {', '.join(map(str, steps))}")
