"""A plan for one rank, and one for 1,024 ranks whose reads are slow at times."""

from swpipe import HOST, PipelinePlan, TaskSchedule
from swpipe.planning import Limits, Ranks, auto_plan
from swpipe.profiler import CostModel, TaskCost

loop = PipelinePlan(
    schedule={
        "read": TaskSchedule(stream=HOST),
        "copy": TaskSchedule(stream="memcpy"),
        "train": TaskSchedule(globally_ordered=True),
    },
    deps=[("copy", "read"), ("train", "copy")],
    cross_iter_deps=[("train", "train")],
)
costs = CostModel(
    {
        "read": TaskCost(host_us=6_000),
        "copy": TaskCost(host_us=50, device_us=3_000),
        "train": TaskCost(host_us=900, device_us=10_000),
    }
)
limits = Limits(in_flight=6, groups=2, frozen=["train"])
ranks = Ranks(number=1_024, jitter=0.05, slow={"read": (0.01, 5.0)})
for choice in (
    auto_plan(loop, costs, limits=limits),
    auto_plan(loop, costs, limits=limits, ranks=ranks),
):
    print(choice.format(), end="\n\n")
