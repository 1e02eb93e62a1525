"""The loss is wrong since yesterday: which task is at fault, and is it the only one?"""

import torch

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.testing import Loop, first_difference


@swpipe.task(pure=True)
def decode(ctx):
    ctx.x, ctx.y = ctx.batch


def norm(ctx):
    ctx.x = ctx.x - ctx.x.mean(1, keepdim=True)  # yesterday: over the rows of the batch


def norm_of_yesterday(ctx):
    ctx.x = ctx.x - ctx.x.mean(0)


def make_loop(norm):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def forward(ctx):
        ctx.loss = (model(ctx.x).squeeze(1) - ctx.y).square().mean()

    def backward(ctx):
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx):
        optimizer.step()

    tasks = [decode, PipelineTask("norm", norm), *map(swpipe.task, (forward, backward, step))]
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[5.0, 4.0], [1.0, 2.0]])
    targets = torch.tensor([-3.0, 3.0]), torch.tensor([3.0, -3.0])
    return Loop([*zip(rows, targets, strict=True)] * 2, tasks, state=lambda: [model, optimizer])


loop = make_loop(norm)
with SWPipeline(PipelinePlan.serial(loop.tasks)) as pipe:
    print("losses today:         ", [f"{ctx.loss.item():.2f}" for ctx in pipe.iterate(loop.loader)])

print(first_difference(lambda: make_loop(norm_of_yesterday), lambda: make_loop(norm)))

loop = make_loop(norm)  # anew, since the run above has trained the model
with (
    SWPipeline(PipelinePlan.serial(loop.tasks)) as pipe,
    pipe.shortcut("norm", with_=norm_of_yesterday),
):
    print("with yesterday's norm:", [f"{ctx.loss.item():.2f}" for ctx in pipe.iterate(loop.loader)])
