"""The most that plans hold, and a plan within a limit."""

import torch

from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.profiler import CostModel, TaskCost, measure_memory


def read(ctx):
    ctx.images = torch.ones(2**20)


def forward(ctx):
    ctx.loss = (2 * ctx.images).square().mean()


tasks = [PipelineTask("read", read), PipelineTask("forward", forward)]
memory = measure_memory(tasks, batches=[None], device="cpu")
costs = CostModel({"read": TaskCost(1_000), "forward": TaskCost(3_000)}, memory=memory)
for depth in (2, 4):
    plan = PipelinePlan(
        schedule={
            "read": TaskSchedule(stage=0, thread_group="io"),
            "forward": TaskSchedule(stage=1),
        },
        deps=[("forward", "read")],
        pipeline_depth=depth,
    )
    print(simulate(plan, costs, streams=False).memory.format())

limited = auto_plan(plan, costs, streams=False, limits=Limits(max_bytes=14 * 2**20))
print(limited.why[-1])
