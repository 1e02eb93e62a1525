"""A simulated plan: its timeline, its interval, what limits it, and what would be possible."""

from swpipe import PipelinePlan, TaskSchedule
from swpipe.planning import lower_bounds, simulate
from swpipe.profiler import CostModel, TaskCost

plan = PipelinePlan(
    schedule={
        "read": TaskSchedule(stage=0, thread_group="io"),
        "decode": TaskSchedule(stage=0, thread_group="io"),
        "forward": TaskSchedule(stage=1),
        "backward": TaskSchedule(stage=1),
        "step": TaskSchedule(stage=1),
    },
    deps=[
        ("decode", "read"),
        ("forward", "decode"),
        ("backward", "forward"),
        ("step", "backward"),
    ],
    cross_iter_deps=[("forward", "step")],
    pipeline_depth=3,
)
costs = CostModel(
    {
        "read": TaskCost(host_us=9_000),  # waits for the disk: needs no interpreter lock
        "decode": TaskCost(host_us=6_000, gil_us=5_000),
        "forward": TaskCost(host_us=4_000, gil_us=1_000),
        "backward": TaskCost(host_us=6_000, gil_us=500),
        "step": TaskCost(host_us=1_000),
    }
)

simulation = simulate(plan, costs, streams=False)
print(simulation.format())
print()
print(simulation.trace().window(0, 3).format(width=90))
print()
print(lower_bounds(plan, costs, streams=False).format())
print()
print("with two threads, free to choose:")
print(lower_bounds(plan, costs, streams=False, threads=2).format())
