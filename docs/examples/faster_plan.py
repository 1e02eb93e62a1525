"""From a profile to a faster plan: measure, take the first advice, measure again, compare."""

import time

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule


def blocks(name, ms, **said):
    """Do the work of a task that blocks its thread, as reading a file does."""
    return PipelineTask(name, lambda ctx: time.sleep(ms / 1000), **said)


model = [DeclaredIO(state="model")]
tasks = [
    blocks("read", 20, pure=True),
    blocks("train", 24, io=model),
    blocks("step", 6, io=model),
]
plan = PipelinePlan(
    schedule={task: TaskSchedule() for task in tasks},  # one thread, one stage: a plain loop
    deps=[("train", "read"), ("step", "train")],
    cross_iter_deps=[("train", "step")],  # training uses the weights of the last step
)

with SWPipeline(plan, tasks) as pipe:
    before = TaskProfiler(pipe).profile(None, num_rounds=6, pipelined=True)
before.print_report()

advice = before.advice[0]
with SWPipeline(advice.plan, tasks) as pipe:
    after = TaskProfiler(pipe).profile(None, num_rounds=6, pipelined=True)
diff = before.diff(after)
print(f"\npromised {advice.saved.text} ms:")
print(diff)

assert advice.task == "read"
assert 0.01 < diff.iteration.saved.value_s < 0.03  # 20 ms in truth
assert after.exposed_s["read"] < before.exposed_s["read"]  # it overlaps training now
