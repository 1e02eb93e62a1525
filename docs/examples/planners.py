"""The planners compared on a training step, under one simulator."""

from dataclasses import replace
from itertools import pairwise

from published_planners import assign_lookaheads, joint_search, list_schedule
from tabulate import tabulate

from swpipe import PipelinePlan, TaskSchedule
from swpipe.planning import Limits, auto_plan, lower_bounds, simulate
from swpipe.profiler import CostModel, TaskCost

ms = {"h2d": 0.3, "shuffle": 7, "input_dist": 9, "prefetch": 1.1}
ms |= {"tokens": 0.1, "forward": 29, "backward": 12, "step": 67}
streams = {"h2d": "memcpy", "shuffle": "memcpy", "input_dist": "data_dist", "prefetch": "prefetch"}
communicate = ("shuffle", "input_dist", "tokens", "backward")
chain = ("h2d", "shuffle", "input_dist", "prefetch", "forward", "backward", "step")
free = PipelinePlan(
    schedule={
        task: TaskSchedule(stream=streams.get(task), globally_ordered=task in communicate)
        for task in ms
    },
    deps=[*pairwise(reversed(chain)), ("tokens", "shuffle"), ("backward", "tokens")],
    cross_iter_deps=[("forward", "step"), ("prefetch", "backward")],
)
costs = CostModel(
    {
        task: TaskCost(device_us=1e3 * time, resources=("nccl",) if task in communicate else ())
        for task, time in ms.items()
    }
)
limits = Limits(frozen=["forward", "backward", "step"])
plan = replace(free, run_ahead=0)  # the host waits for the device in every iteration


def row(name: str, found: PipelinePlan) -> tuple[str, str, int, int]:
    ii_us = simulate(found, costs).ii_us
    return name, f"{ii_us:,.0f}", found.depth, len(found.thread_groups)


joint = joint_search(plan, costs, limits=limits)
rows = [
    row("serial, the host runs ahead", free),
    row("serial", plan),
    row("list_schedule", list_schedule(plan, costs).plan),
    row("assign_lookaheads", assign_lookaheads(plan, costs, limits=limits).plan),
    row("joint_search", joint.plan),
    row("auto_plan", auto_plan(plan, costs, limits=limits).plan),
    ("lower bound", f"{lower_bounds(plan, costs).ii_us:,.0f}", "", ""),
]
right = ("left", "right", "right", "right")
print(tabulate(rows, headers=("planner", "interval us", "in flight", "threads"), colalign=right,
               disable_numparse=True))  # fmt: skip
print()
print("joint_search:", joint.why)
