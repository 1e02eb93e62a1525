"""The same four tasks, serially and pipelined: the same losses, bit for bit."""

import zlib

import torch

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule


def batches(count):
    """Yield compressed rows of 64 features, as a reader would."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield zlib.compress(torch.randn(2048, 64, generator=generator).numpy().tobytes())


def train(plan_of):
    """Return the losses of 20 steps under the plan that ``plan_of`` makes for the tasks."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def decode(ctx):
        rows = bytearray(zlib.decompress(ctx.batch))
        ctx.x = torch.frombuffer(rows, dtype=torch.float32).view(-1, 64)

    def forward(ctx):
        ctx.loss = model(ctx.x).sub(ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(ctx):
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx):
        optimizer.step()

    tasks = [PipelineTask(fn.__name__, fn) for fn in (decode, forward, backward, step)]
    with SWPipeline(plan_of(tasks), tasks) as pipe:
        return [ctx.loss.item() for ctx in pipe.iterate(batches(20))]


def pipelined(tasks):
    """Return a plan that decodes one batch ahead, on a separate thread."""
    return PipelinePlan(
        schedule={
            "decode": TaskSchedule(stage=0, thread_group="io"),
            "forward": TaskSchedule(stage=1),
            "backward": TaskSchedule(stage=1),
            "step": TaskSchedule(stage=1),
        },
        deps=[("forward", "decode"), ("backward", "forward"), ("step", "backward")],
        cross_iter_deps=[("forward", "step")],
    )


serial_losses = train(PipelinePlan.serial)
pipelined_losses = train(pipelined)
print(f"loss {serial_losses[0]:.2f} -> {serial_losses[-1]:.2f}")
print("bit-equal:", serial_losses == pipelined_losses)
assert serial_losses == pipelined_losses
