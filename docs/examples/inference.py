"""Infer what tasks read and write from a recording, and find the dependence that a plan lacks."""

from dataclasses import replace

import torch

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.inference import record

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def load(ctx):
    ctx.x = torch.tensor(ctx.batch)


def forward(ctx):
    ctx.loss = model(ctx.x).square().mean()


def backward(ctx):
    optimizer.zero_grad()
    ctx.loss.backward()


def step(ctx):
    optimizer.step()


tasks = [PipelineTask(fn.__name__, fn) for fn in (load, forward, backward, step)]
batches = [[[float(i + k) for k in range(4)] for i in range(n, n + 2)] for n in range(6)]

# A plan that loads ahead and runs forward on another thread. One dependence is missing.
schedule = {
    "load": TaskSchedule(stage=0, thread_group="io"),
    "forward": TaskSchedule(stage=1, thread_group="model"),
    "backward": TaskSchedule(stage=1),
    "step": TaskSchedule(stage=1),
}
by_hand = PipelinePlan(
    schedule, deps=[("forward", "load"), ("backward", "forward"), ("step", "backward")]
)
recording = record(tasks, batches[0])
print(recording.report(by_hand))

# The same schedule with inferred dependences.
inferred = replace(recording.plan(), schedule=schedule)
assert recording.compare(inferred).missing == ()
with SWPipeline(inferred, inferred.tasks) as pipe:
    report = pipe.run(batches)
print("\nunder the inferred plan:", report.iterations, "iterations")
