"""A task fails on a worker thread: the caller gets the error itself, and can go on."""

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule


def parse(ctx):
    ctx.value = int(ctx.batch)


def double(ctx):
    ctx.value *= 2


tasks = [PipelineTask("parse", parse), PipelineTask("double", double)]
plan = PipelinePlan(
    schedule={
        "parse": TaskSchedule(stage=0, thread_group="io"),
        "double": TaskSchedule(stage=1),
    },
    deps=[("double", "parse")],
)

with SWPipeline(plan, tasks) as pipe:
    try:
        pipe.run(["1", "2", "three", "4"])
    except ValueError as error:
        print(error)
        print(*error.__notes__, sep="\n")

    values = [ctx.value for ctx in pipe.iterate(["5", "6"])]
    print(values)
    assert values == [10, 12]
