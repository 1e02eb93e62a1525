"""A plan is pure data: it reads and writes itself unchanged, and says at once what is malformed."""

from __future__ import annotations

import json
import pickle
import tomllib
from pathlib import Path

import pytest
import torch

from swpipe import PipelinePlan, PipelineTask, PlanError, StreamSpec, TaskSchedule
from tests.plans_for_tests import piped, tasks


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_plan_goes_to_a_file_and_back_unchanged(tmp_path: Path, suffix: str) -> None:
    """Saving and loading gives an equal plan."""
    plan = PipelinePlan(
        schedule=piped().schedule,
        deps=piped().deps,
        cross_iter_deps=[("forward", "step", 2)],
        same_period_deps=[("backward", "h2d")],
        order=["h2d", "forward"],
        streams={"memcpy": StreamSpec(priority=-1)},
        pipeline_depth=5,
    )
    plan.save(tmp_path / f"plan{suffix}")
    assert PipelinePlan.load(tmp_path / f"plan{suffix}") == plan


def test_plans_written_with_tasks_and_with_names_are_equal() -> None:
    """A task and its name mean the same everywhere in a plan."""
    a, b = PipelineTask("a", print), PipelineTask("b", print)
    by_task = PipelinePlan(
        schedule={a: TaskSchedule(), b: TaskSchedule(stage=1)},
        deps=[(b, a)],
        cross_iter_deps=[(a, b)],
        order=[a, b],
    )
    by_name = PipelinePlan(
        schedule={"a": TaskSchedule(), "b": TaskSchedule(stage=1)},
        deps=[("b", "a")],
        cross_iter_deps=[("a", "b", 1)],
        order=["a", "b"],
    )
    assert by_task == by_name
    assert by_task.tasks == (a, b)


def test_serial_puts_every_task_in_one_stage_in_the_order_given() -> None:
    """The serial plan has one stage, one iteration in flight, and the declared order."""
    plan = PipelinePlan.serial(tasks())
    assert {entry.stage for entry in plan.schedule.values()} == {0}
    assert plan.depth == 1
    assert plan.order == ("h2d", "dist", "forward", "backward", "step")


def test_depth_is_the_least_that_works_unless_set() -> None:
    """The default depth is the last stage + 1."""
    assert piped(depth=None).depth == 3
    assert piped(depth=7).depth == 7


def test_a_plan_can_be_pickled() -> None:
    """Plans travel to other processes."""
    assert pickle.loads(pickle.dumps(piped())) == piped()


def test_a_digest_tells_plans_apart() -> None:
    """Equal plans have equal digests, and any change of data changes it."""
    assert piped().digest() == piped().digest()
    assert piped().digest() != piped(depth=4).digest()


def test_a_stream_object_cannot_be_written_to_a_file() -> None:
    """Only named streams are data; the error says so and names the task."""
    plan = PipelinePlan(schedule={"a": TaskSchedule(stream=torch.Stream(device="cpu"))})
    with pytest.raises(TypeError, match="'a'.*name the stream instead"):
        plan.to_toml()


def test_everything_malformed_is_listed_at_once() -> None:
    """Building a plan from wrong entries gives one error with a line for each."""
    with pytest.raises(PlanError) as caught:
        PipelinePlan(
            schedule={"a": TaskSchedule(), 3: TaskSchedule(), "b": "stage 1"},  # type: ignore[dict-item]
            deps=[("a",), "ab"],
            cross_iter_deps=[("a", "b", 0), ("a", "b", -1)],
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for said in ("key 3", "'b'", "deps entry ('a',)", "deps entry 'ab'", "distance of 1 or more"):
        assert said in text


def test_a_task_scheduled_under_two_keys_is_refused() -> None:
    """A task and its name as keys of one schedule are the same task twice."""
    with pytest.raises(PlanError, match="'a' is scheduled twice"):
        PipelinePlan(schedule={"a": TaskSchedule(), PipelineTask("a", print): TaskSchedule()})


def test_wrong_keys_and_types_in_a_file_are_named() -> None:
    """A file that is TOML but no plan says which keys and values are wrong."""
    with pytest.raises(PlanError) as caught:
        PipelinePlan.from_toml('depth = 3\ndeps = 4\n[schedule.a]\nstage = "one"\nlevel = 2\n')
    text = str(caught.value)
    for said in ("'depth'", "deps is 4", "schedule.a.stage is 'one'", "'level'"):
        assert said in text


def test_a_file_without_a_schedule_is_refused() -> None:
    """An empty file is no plan."""
    with pytest.raises(PlanError, match=r"no \[schedule\]"):
        PipelinePlan.from_toml("")


def test_text_that_does_not_parse_keeps_line_and_column() -> None:
    """Syntax errors come from the parser, with their place."""
    with pytest.raises(tomllib.TOMLDecodeError, match="line 2, column"):
        PipelinePlan.from_toml("[schedule.a]\nstage = = 1\n")
    with pytest.raises(json.JSONDecodeError, match="line 1 column"):
        PipelinePlan.from_json("{schedule}")
    with pytest.raises(PlanError, match="JSON object"):
        PipelinePlan.from_json("[]")


@pytest.mark.parametrize(
    ("name", "error"), [("", ValueError), ("<admit>", ValueError), (3, TypeError)]
)
def test_a_task_needs_a_proper_name(name: object, error: type[Exception]) -> None:
    """Empty names, swpipe's own, and what is no string are refused."""
    with pytest.raises(error, match="name"):
        PipelineTask(name, print)  # type: ignore[arg-type]


def test_a_task_needs_a_function() -> None:
    """What cannot be called is refused, with the task's name."""
    with pytest.raises(TypeError, match="'a'.*callable"):
        PipelineTask("a", 7)  # type: ignore[arg-type]


def test_tasks_are_equal_when_their_names_are() -> None:
    """The function does not count."""
    assert PipelineTask("a", print) == PipelineTask("a", len)
    assert hash(PipelineTask("a", print)) == hash(PipelineTask("a", len))
