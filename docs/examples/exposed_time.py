"""Which task is worth hiding? Serially all of them cost; under the plan only what nothing hides."""

import time

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule


def read(ctx):
    time.sleep(0.010)


def compute(ctx):
    time.sleep(0.015)


tasks = [PipelineTask("read", read), PipelineTask("compute", compute)]
plan = PipelinePlan(
    schedule={
        "read": TaskSchedule(stage=0, thread_group="io"),
        "compute": TaskSchedule(stage=1),
    },
    deps=[("compute", "read")],
)

counts = {"num_warmup": 2, "num_measure": 5, "num_rounds": 2}
with SWPipeline(plan, tasks) as pipe:
    profiler = TaskProfiler(pipe)
    serial = profiler.profile_many([None], **counts)[0]
    piped = profiler.profile_many([None], **counts, pipelined=True)[0]

serial.print_report()
piped.print_report()
assert serial.exposed_s["read"] > 0.005  # 10 ms in truth
assert piped.exposed_s["read"] < serial.exposed_s["read"]  # none: it runs beside compute
