"""The actual times of three stages on three threads, as a picture and in figures."""

import time
from pathlib import Path

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.trace import Trace


def blocks(name, ms):
    """Do the work of a task that blocks its thread, as reading a file does."""
    return PipelineTask(name, lambda ctx: time.sleep(ms / 1000))


tasks = [
    blocks("read", 8),
    blocks("decode", 7),
    blocks("dist", 11),
    blocks("forward", 8),
    blocks("backward", 10),
    blocks("step", 5),
]
plan = PipelinePlan(
    schedule={
        "read": TaskSchedule(stage=0, thread_group="io"),
        "decode": TaskSchedule(stage=0, thread_group="io"),
        "dist": TaskSchedule(stage=1, thread_group="dist", globally_ordered=True),
        "forward": TaskSchedule(stage=2),
        "backward": TaskSchedule(stage=2, globally_ordered=True),
        "step": TaskSchedule(stage=2),
    },
    deps=[
        ("decode", "read"),
        ("dist", "decode"),
        ("forward", "dist"),
        ("backward", "forward"),
        ("step", "backward"),
    ],
    cross_iter_deps=[("forward", "step")],
)

with SWPipeline(plan, tasks) as pipe, pipe.trace() as trace:
    pipe.run(range(20))

out = Path("out")
out.mkdir(exist_ok=True)
trace.save(out / "timeline.json")  # opens in chrome://tracing and in the Perfetto UI
print(trace.window(0, 3).format(width=100))
print(trace.format_summary())
assert Trace.load(out / "timeline.json").spans == trace.spans

try:
    trace.window(0, 3).plot(out / "timeline.png")
except ImportError as error:  # pictures are an extra
    print(error)
