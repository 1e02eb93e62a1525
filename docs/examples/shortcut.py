"""A shortcut task is not run: its outputs are put back, and the graph before it gets zeros."""

import torch

from swpipe import PipelinePlan, PipelineTask, SWPipeline

weight = torch.nn.Parameter(torch.ones(3))
calls = []


def embed(ctx):
    ctx.embedding = weight * ctx.batch


def interact(ctx):
    calls.append("interact")
    ctx.score = (ctx.embedding**2).sum()


def backward(ctx):
    ctx.score.backward()


tasks = [PipelineTask(fn.__name__, fn) for fn in (embed, interact, backward)]
batch = torch.tensor([1.0, 2.0, 3.0])

with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
    with pipe.shortcut("interact"):
        pipe.run([batch])  # runs it once more, and keeps what it produced
        weight.grad = None
        (replayed,) = pipe.iterate([batch])
        print("replayed score", replayed.score.item(), "gradient", weight.grad)
        assert weight.grad.tolist() == [0.0, 0.0, 0.0]
    weight.grad = None
    pipe.run([batch])
    print("gradient without the shortcut", weight.grad)
    assert weight.grad.tolist() == [2.0, 8.0, 18.0]

print("interact ran", len(calls), "times in 3 iterations")
assert len(calls) == 2
