"""A plan that is made from costs alone."""

from swpipe import PipelinePlan, TaskSchedule
from swpipe.planning import Limits, auto_plan
from swpipe.profiler import CostModel, TaskCost

loop = PipelinePlan(
    schedule={
        "read": TaskSchedule(),
        "copy": TaskSchedule(stream="memcpy"),
        "forward": TaskSchedule(),
        "backward": TaskSchedule(globally_ordered=True),
        "step": TaskSchedule(),
    },
    deps=[("copy", "read"), ("forward", "copy"), ("backward", "forward"), ("step", "backward")],
    cross_iter_deps=[("forward", "step")],
)
costs = CostModel(
    {
        "read": TaskCost(host_us=9_000),  # blocks the thread
        "copy": TaskCost(host_us=50, device_us=3_000),  # the thread only submits the copy
        "forward": TaskCost(host_us=900, device_us=4_000),
        "backward": TaskCost(host_us=1_100, device_us=5_500),
        "step": TaskCost(host_us=300, device_us=1_200),
    }
)
choice = auto_plan(
    loop, costs, limits=Limits(in_flight=4, groups=3, frozen=["forward", "backward", "step"])
)
print(choice.format())
