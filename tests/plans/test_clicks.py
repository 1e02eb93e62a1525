"""The click job's ready-made plans."""

from __future__ import annotations

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.clicks import COMPUTE, FEED, PLANS, TASKS


def test_a_plan_schedules_every_task_and_can_run() -> None:
    """A batch goes through all tasks in their order; as TOML and back a plan is the same."""
    ran: list[str] = []
    tasks = [PipelineTask(task, lambda ctx, task=task: ran.append(task)) for task in TASKS]
    for make in PLANS.values():
        plan = make()
        with SWPipeline(plan, tasks, device="cpu") as pipe:
            assert pipe.run([None]).iterations == 1
        assert PipelinePlan.from_toml(plan.to_toml()) == plan
    assert tuple(ran) == TASKS * len(PLANS)
    assert PLANS["serial"]() == PipelinePlan.serial(tasks)


def test_pipelined_feeds_on_its_own_thread_and_is_never_stale() -> None:
    """No iteration reads parameters before the last one updated them."""
    plan = PLANS["pipelined"]()
    assert {plan.schedule[name].thread_group for name in FEED} == {"io"}
    assert {plan.schedule[name].thread_group for name in COMPUTE} == {"default"}
    assert {("embed", "step", 1), ("forward", "step", 1)} <= {*plan.cross_iter_deps}
