"""A plan is data: it is drawn, written to a file and read back."""

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule


def nothing(ctx):
    """Do nothing, where a task would work."""


tasks = [PipelineTask(name, nothing) for name in ("decode", "copy", "forward", "backward", "step")]
plan = PipelinePlan(
    schedule={
        "decode": TaskSchedule(stage=0, thread_group="io"),
        "copy": TaskSchedule(stage=1, stream="memcpy"),
        "forward": TaskSchedule(stage=2),
        "backward": TaskSchedule(stage=2),
        "step": TaskSchedule(stage=2),
    },
    deps=[("copy", "decode"), ("forward", "copy"), ("backward", "forward"), ("step", "backward")],
    cross_iter_deps=[("forward", "step")],
)

with SWPipeline(plan, tasks) as pipe:
    print(pipe.format_schedule(6), end="\n\n")
    print(pipe.format_stage_analysis())

plan.save("plan.toml")
assert PipelinePlan.load("plan.toml") == plan
assert PipelinePlan.from_json(plan.to_json()) == plan
