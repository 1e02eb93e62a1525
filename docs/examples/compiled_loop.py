"""A compiled model and a compiled step over a loader that is pulled ahead."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe


def make(backend):
    """Return the tasks of a loop, and its loader; the first batches compile."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    compiled = torch.compile(model, backend=backend)

    @torch.compile(backend=backend)
    def update():
        optimizer.step()
        optimizer.zero_grad()

    @swpipe.task(pure=True)
    def decode(ctx):
        """Decode the batch; this task runs ahead, on a separate thread."""
        ctx.x = ctx.batch[0] * 2

    def forward(ctx):
        ctx.loss = compiled(ctx.x).square().mean()

    def backward(ctx):
        ctx.loss.backward()

    def step(ctx):
        update()

    rows = TensorDataset(torch.randn(40, 4))
    loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1)
    return [decode, forward, backward, step], loader


backend = "aot_eager"  # the default, "inductor", needs a C++ compiler
tasks, loader = make(backend)
plain = []
for number, batch in enumerate(loader):
    ctx = swpipe.IterContext(batch, number)
    for task in tasks:
        task(ctx)
    plain.append(ctx.loss.item())

tasks, loader = make(backend)
with swpipe.overlap(loader, tasks) as loop:
    print("ahead: the loader,", *loop.overlap.ahead)
    print("losses as in the plain loop:", [ctx.loss.item() for ctx in loop] == plain)
