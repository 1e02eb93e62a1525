"""Logs of an overlapped loop: losses from its body, the times of its tasks by an observer."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe.trace import Observer

EVERY = 5


class Writer:
    """Keeps what it is given; any object with ``add_scalar(tag, value, step)`` will do."""

    def __init__(self):
        self.steps = {}

    def add_scalar(self, tag, value, step):
        """As that of TensorBoard's SummaryWriter, which also stores the value."""
        assert isinstance(value, float)
        self.steps.setdefault(tag, []).append(step)


class TaskTimes(Observer):
    """How long each task took, by iteration.

    It is called on the thread that runs the task, and for iterations that the loop's body gets
    later. So it keeps the times, and the body writes them.
    """

    def __init__(self):
        self._began = {}
        self._took_ms = {}

    def start(self, ins, iteration):
        """The task starts."""
        self._began[ins.task, iteration] = time.perf_counter()

    def stop(self, ins, iteration, exists=True):
        """The task has ended; at the end of the data there is no such iteration."""
        took_ms = 1e3 * (time.perf_counter() - self._began.pop((ins.task, iteration)))
        if exists:
            self._took_ms.setdefault(iteration, {})[ins.task.strip("<>")] = took_ms

    def pop(self, iteration):
        """All tasks of an iteration that the body has got."""
        return self._took_ms.pop(iteration)


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
rows = TensorDataset(torch.randn(48, 4))
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1)


@swpipe.task(pure=True)
def decode(ctx):
    """Runs ahead, on a thread of its own."""
    ctx.x = ctx.batch[0] * 2


def forward(ctx):
    """As everything that follows, on this thread."""
    ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    """As in a plain loop."""
    optimizer.zero_grad()
    ctx.loss.backward()


def step(ctx):
    """As in a plain loop."""
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
