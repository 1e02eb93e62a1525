"""A plan with a race, what verification reports, and the fixed plan."""

from dataclasses import replace

from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis import Effects, Location, verify
from swpipe.core.task_memory import KEPT, Block, TaskMemory
from swpipe.errors import PlanError

batch, ids, loss = (Location(name, persistent=False) for name in ("batch", "ids", "loss"))
model = Location("model", persistent=True)


def touching(reads=(), writes=()):
    return Effects(frozenset(reads), frozenset(writes))


effects = {  # in serial order; a recording gives this table
    "read": touching([batch], [ids]),
    "embed": touching([ids, model], [ids]),
    "train": touching([ids, model], [model, loss]),
}
plan = PipelinePlan(
    schedule={
        "read": TaskSchedule(stage=0, thread_group="io"),
        "embed": TaskSchedule(stage=0, thread_group="io", stream="side"),
        "train": TaskSchedule(stage=1),
    },
    deps=[("embed", "read"), ("train", "embed")],
)
kind = {"pull_ahead": True, "body": False}  # a loader that is apart, and run(), which has no body

try:
    verify(plan, effects=effects, **kind)
except PlanError as error:
    print(error)

fixed = replace(plan, cross_iter_deps=[("embed", "train", 1)])
print(f"\nfixed: {verify(fixed, effects=effects, **kind).orders} orders are kept")

late = replace(plan, same_period_deps=[("train", "embed")], stale={"model": 1})
print(f"stale on purpose: {verify(late, effects=effects, **kind).orders} orders are kept")

memory = TaskMemory(  # swpipe.profiler.measure_memory gives this
    (
        Block("read", "embed", 2**20, "ids", removed=True),
        Block("embed", KEPT, 64 * 2**20, "ids"),
        Block("train", KEPT, 4, "loss"),
    )
)
try:
    verify(fixed, effects=effects, **kind, memory=memory, budget_bytes=100 * 2**20)
except PlanError as error:
    print(f"\n{error.problems[0].text}")
