"""Train, stop half-way, evaluate, and go on: no batch is lost, none takes the wrong mode."""

import torch

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule


def load(ctx):
    ctx.x = ctx.batch * 2.0


def forward(ctx):
    ctx.training = torch.is_grad_enabled()
    ctx.y = ctx.x + 1.0


tasks = [PipelineTask("load", load), PipelineTask("forward", forward)]
plan = PipelinePlan(
    schedule={
        "load": TaskSchedule(stage=0, thread_group="io"),
        "forward": TaskSchedule(stage=1),
    },
    deps=[("forward", "load")],
)
train_data = [torch.tensor(float(n)) for n in range(8)]
eval_data = [torch.tensor(float(n)) for n in range(100, 103)]

with SWPipeline(plan, tasks) as pipe:
    train_iter = iter(train_data)
    done = [pipe.progress(train_iter) for _ in range(3)]  # one more batch is in flight now

    try:
        pipe.progress(iter(eval_data))
    except RuntimeError as refusal:
        print("refused:", refusal)

    done += pipe.drain()
    with torch.no_grad():
        evaluated = list(pipe.iterate(eval_data))
    done += list(pipe.iterate(train_iter))

print("trained on", [int(ctx.batch) for ctx in done])
print("evaluated on", [int(ctx.batch) for ctx in evaluated])
assert [int(ctx.batch) for ctx in done] == list(range(8))
assert all(ctx.training for ctx in done)
assert not any(ctx.training for ctx in evaluated)
