"""The planners side by side on a published training step, under one simulator."""

from dataclasses import replace

from tabulate import tabulate

from swpipe import PipelinePlan
from swpipe.planning import (
    assign_lookaheads,
    auto_plan,
    joint_search,
    list_schedule,
    lower_bounds,
    recsys14,
    simulate,
)

free, costs, limits = recsys14.plan(), recsys14.costs(), recsys14.limits()
plan = replace(free, run_ahead=0)  # the host waits for the device in every iteration


def row(name: str, found: PipelinePlan) -> tuple[str, str, int, int]:
    groups = {entry.thread_group for entry in found.schedule.values()}
    ii_us = simulate(found, costs).ii_us
    return name, f"{ii_us:,.0f}", found.depth, len(groups | {"default"})


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
