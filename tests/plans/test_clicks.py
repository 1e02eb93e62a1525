"""The click job's ready-made plans."""

from __future__ import annotations

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.clicks import COMPUTE, FEED, PLANS, TASKS


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_schedules_every_task_and_can_run(name: str) -> None:
    """It passes verification, and a batch goes through all tasks in their order."""
    ran: list[str] = []
    tasks = [PipelineTask(task, lambda ctx, task=task: ran.append(task)) for task in TASKS]
    with SWPipeline(PLANS[name](), tasks, device="cpu") as pipe:
        assert pipe.run([None]).iterations == 1
    assert tuple(ran) == TASKS


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_can_be_saved_and_loaded(name: str) -> None:
    """As TOML and back it is the same."""
    plan = PLANS[name]()
    assert PipelinePlan.from_toml(plan.to_toml()) == plan


def test_serial_equals_the_generic_serial_plan() -> None:
    """Equal to ``PipelinePlan.serial`` of the same tasks."""
    tasks = [PipelineTask(name, lambda ctx: None) for name in TASKS]
    assert PLANS["serial"]() == PipelinePlan.serial(tasks)


def test_pipelined_feeds_on_its_own_thread() -> None:
    """Feeding and training run on different threads."""
    schedule = PLANS["pipelined"]().schedule
    assert {schedule[name].thread_group for name in FEED} == {"io"}
    assert {schedule[name].thread_group for name in COMPUTE} == {"default"}


def test_no_iteration_reads_parameters_before_the_last_one_updated_them() -> None:
    """Training under the plan is never stale."""
    carried = PLANS["pipelined"]().cross_iter_deps
    assert ("embed", "step", 1) in carried
    assert ("forward", "step", 1) in carried
