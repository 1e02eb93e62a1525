"""What a planner must keep to."""

from __future__ import annotations

import pytest

from swpipe import PipelinePlan, PipelineTask, PlanError, TaskSchedule
from swpipe.planning import Limits


def test_frozen_takes_tasks_and_names() -> None:
    """Whatever names a task takes the task or its name; a single name is one name."""
    task = PipelineTask("step", lambda ctx: None)
    assert Limits(frozen=[task, "forward"]).frozen == ("step", "forward")
    assert Limits(frozen="step").frozen == ("step",)


def test_all_that_is_wrong_is_said_at_once() -> None:
    """Numbers that are no counts and a frozen task without a name are listed together."""
    with pytest.raises(PlanError) as raised:
        Limits(0, 1.5, (3,))  # type: ignore[arg-type]
    texts = [problem.text for problem in raised.value.problems]
    assert texts == [
        "the limit on iterations in flight is 0: give an integer of 1 or more",
        "the limit on thread groups is 1.5: give an integer of 1 or more",
        "frozen has 3, which is neither a task nor a task's name",
    ]


def test_true_is_no_count() -> None:
    """A bool is an int to Python, but no number of threads."""
    with pytest.raises(PlanError, match="thread groups is True"):
        Limits(threads=True)


def test_a_frozen_task_that_the_plan_lacks_is_refused() -> None:
    """A misspelt name would freeze nothing without a word."""
    plan = PipelinePlan({"a": TaskSchedule(), "step": TaskSchedule()})
    Limits(frozen=("step",)).check(plan)
    with pytest.raises(PlanError, match="freeze 'stepp', which the plan does not have .it has: a"):
        Limits(frozen=("stepp",)).check(plan)
