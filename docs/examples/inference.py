"""Infer what tasks read and write from a recording, and find the dependence that a plan lacks."""

from dataclasses import replace

import torch

from swpipe import DeclaredIO, PipelinePlan, SWPipeline, TaskSchedule, task
from swpipe.inference import record

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


@task(pure=True)  # uses and changes its context only
def load(ctx):
    ctx.x = torch.tensor(ctx.batch)


@task(io=[DeclaredIO(state="model", mode="r", memory=model)])
def forward(ctx):
    ctx.loss = model(ctx.x).square().mean()


@task  # says nothing, as step: both stay in order on the caller's thread
def backward(ctx):
    optimizer.zero_grad()
    ctx.loss.backward()


@task
def step(ctx):
    optimizer.step()


tasks = [load, forward, backward, step]
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
