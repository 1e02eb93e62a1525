"""What cannot run is refused before the first batch: everything at once, with the grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swpipe import PipelinePlan, StreamSpec, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped, task, tasks

A_B = {"a": TaskSchedule(), "b": TaskSchedule()}


def refused(plan: PipelinePlan, *names: str, device: str = "cpu") -> str:
    """The text with which ``check`` refuses a plan for the named tasks."""
    with pytest.raises(PlanError) as caught:
        validate(plan, [task(name) for name in names], device)
    return str(caught.value)


def test_a_good_plan_passes() -> None:
    """Nothing is wrong with the plan of the example."""
    validate(piped(), tasks())


def test_an_empty_plan_is_refused() -> None:
    """A plan schedules at least one task."""
    assert "the plan is empty" in refused(PipelinePlan(schedule={}))


def test_tasks_and_schedule_must_name_the_same() -> None:
    """Doubles, tasks without a schedule and schedules without a task are all named."""
    text = refused(PipelinePlan(schedule=A_B), "a", "a", "c")
    assert "task 'a' is given 2 times" in text
    assert "task 'c' has no schedule" in text
    assert "schedules 'b', which is not among the tasks (a, a, c)" in text


@pytest.mark.parametrize("stage", [-1, 1.5, "0", True])
def test_a_stage_is_an_integer_from_0(stage: Any) -> None:
    """Negative stages and what is no integer are refused."""
    text = refused(PipelinePlan(schedule={"a": TaskSchedule(stage=stage)}), "a")
    assert f"task 'a': stage is {stage!r}" in text


@pytest.mark.parametrize("depth", [0, 1, -3])
def test_a_depth_below_the_stages_is_refused(depth: int) -> None:
    """The depth must hold max stage + 1 iterations; the error says which stage needs it."""
    plan = PipelinePlan(schedule={"a": TaskSchedule(stage=1)}, pipeline_depth=depth)
    assert f"pipeline_depth is {depth}, but stage 1 of 'a' needs 2" in refused(plan, "a")


def test_a_future_read_is_refused_with_both_mends_and_marked_in_the_grid() -> None:
    """The consumer in an earlier stage than its producer would read what is not there yet."""
    plan = PipelinePlan(
        schedule={"a": TaskSchedule(stage=0), "b": TaskSchedule(stage=2)}, deps=[("a", "b")]
    )
    text = refused(plan, "a", "b")
    assert "future read: a after b (deps)" in text
    assert "move 'a' to stage 2 or later, or 'b' to stage 0 or earlier" in text
    assert "a [default]  0!  1!  2!" in text


def test_a_dependence_over_iterations_may_look_back_over_stages() -> None:
    """A lag of 0 across iterations is fine; one less is a future read."""
    schedule = {"a": TaskSchedule(stage=0), "b": TaskSchedule(stage=1)}
    validate(
        PipelinePlan(schedule=schedule, cross_iter_deps=[("a", "b", 1)]), [task("a"), task("b")]
    )
    schedule["b"] = TaskSchedule(stage=2)
    assert "future read" in refused(
        PipelinePlan(schedule=schedule, cross_iter_deps=[("a", "b", 1)]), "a", "b"
    )


def test_a_cycle_within_a_period_is_shown() -> None:
    """Tasks that wait for each other in one period are named along the cycle."""
    plan = PipelinePlan(schedule=A_B, deps=[("a", "b")], same_period_deps=[("b", "a")])
    text = refused(plan, "a", "b")
    assert "within an iteration form a cycle: 'a' after 'b' after 'a'" in text


def test_a_cycle_across_stages_is_shown() -> None:
    """Edges of lag 0 over different iterations can form a cycle that no single iteration has."""
    plan = PipelinePlan(
        schedule={"a": TaskSchedule(stage=0), "b": TaskSchedule(stage=1)},
        cross_iter_deps=[("a", "b")],
        same_period_deps=[("b", "a")],
    )
    assert "within a period form a cycle: 'a' after 'b' after 'a'" in refused(plan, "a", "b")


def test_a_task_cannot_wait_for_itself() -> None:
    """The shortest cycle."""
    plan = PipelinePlan(schedule=A_B, deps=[("a", "a")])
    assert "'a' after 'a'" in refused(plan, "a", "b")


def test_an_order_that_contradicts_the_dependences_is_refused() -> None:
    """The order decides ties only."""
    plan = PipelinePlan(schedule=A_B, deps=[("b", "a")], order=["b", "a"])
    assert "order contradicts the dependences" in refused(plan, "a", "b")


def test_names_that_the_schedule_lacks_are_refused_wherever_they_stand() -> None:
    """Every list of names is checked, all in one error."""
    plan = PipelinePlan(
        schedule=A_B,
        deps=[("a", "x")],
        cross_iter_deps=[("y", "a")],
        same_period_deps=[("a", "z")],
        order=["a", "w", "a"],
    )
    text = refused(plan, "a", "b")
    for name in "xyzw":
        assert f"names {name!r}, which the schedule does not have" in text
    assert "order names 'a' 2 times" in text


def test_streams_must_fit_the_device_and_be_used() -> None:
    """Streams of another device, without a name, or described but not used, are refused."""
    plan = PipelinePlan(
        schedule={
            "a": TaskSchedule(stream=torch.Stream(device="cpu")),
            "b": TaskSchedule(stream=""),
        },
        streams={"memcpi": StreamSpec(priority=-1), "odd": 3},  # type: ignore[dict-item]
    )
    text = refused(plan, "a", "b", device="cuda")
    assert "task 'a': its stream belongs to cpu" in text
    assert "task 'b': stream is ''" in text
    assert "streams has 'memcpi', but no task names it" in text
    assert "stream 'odd': its description is 3" in text


def test_a_stream_belongs_to_the_very_device_of_the_pipeline() -> None:
    """Where both are known, the index counts as well."""
    second = torch.Stream(stream_id=0, device_index=1, device_type=1)
    plan = PipelinePlan(schedule={"a": TaskSchedule(stream=second)})
    text = refused(plan, "a", device="cuda:0")
    assert (
        "task 'a': its stream belongs to cuda:1, unknown to the pipeline's device (cuda:0)" in text
    )
    validate(plan, [task("a")], "cuda:1")
    validate(plan, [task("a")], "cuda")


@pytest.mark.parametrize("stream", [["memcpy"], {"memcpy": 1}, 7])
def test_a_stream_is_a_name_or_a_stream(stream: Any) -> None:
    """Whatever else stands there is told, even what no set can hold."""
    plan = PipelinePlan(schedule={"a": TaskSchedule(stream=stream)}, streams={"s": StreamSpec()})
    assert f"task 'a': stream is {stream!r}; give a name" in refused(plan, "a")


def test_what_is_no_task_is_refused() -> None:
    """A bare function has no name to stand for it in a plan."""
    plan = PipelinePlan(schedule={"a": TaskSchedule()})
    with pytest.raises(
        PlanError, match=r"tasks has <built-in .*write PipelineTask\(name, function"
    ):
        validate(plan, [task("a"), print])  # type: ignore[list-item]


def test_a_thread_group_needs_a_name() -> None:
    """An empty group is refused."""
    plan = PipelinePlan(schedule={"a": TaskSchedule(thread_group="")})
    assert "task 'a': thread_group is ''" in refused(plan, "a")


def test_everything_wrong_is_listed_in_one_error() -> None:
    """Problems of different kinds come together, numbered."""
    plan = PipelinePlan(
        schedule={"a": TaskSchedule(stage=-1)}, deps=[("a", "x")], pipeline_depth=-1
    )
    text = refused(plan, "a", "b")
    assert "4 problems" in text
    assert "  4. " in text
