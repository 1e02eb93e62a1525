"""A plan is plain data: it reads and writes itself unchanged, and reports what is malformed."""

from __future__ import annotations

import copy
import json
import pickle
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swpipe import PipelinePlan, PipelineTask, StreamSpec, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped, tasks

FIELDS: dict[str, Any] = {
    "cross_iter_deps": [("forward", "step", 2)],
    "same_period_deps": [("backward", "h2d")],
    "host_only": [("backward", "h2d")],
    "order": ["h2d", "forward"],
    "streams": {"memcpy": StreamSpec(priority=-1)},
    "pipeline_depth": 7,
    "pull_group": "loader",
    "stale": {"model": 2},
    "newer": {"ids": 1},
    "within_calls": True,
    "keep": [],
    "run_ahead": 0,
}
"""A value of each field that a file may have; none is a default."""

MAY_DIFFER = {"streams", "stale", "newer", "run_ahead"}
"""Fields that order nothing: ranks need not agree on them."""


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_goes_to_a_file_and_back_unchanged(
    tmp_path: Path, suffix: str, workers: int
) -> None:
    """Saving and loading gives an equal plan; what is left out is not written."""
    entry = TaskSchedule(thread_group="io", workers=workers)
    plan = PipelinePlan({**piped().schedule, "h2d": entry}, piped().deps, **FIELDS)
    path = tmp_path / f"plan{suffix}"
    plan.save(path)
    assert PipelinePlan.load(path) == plan
    assert {*FIELDS} <= plan.to_dict().keys()
    assert PipelinePlan(piped().schedule).to_dict().keys() == {"schedule"}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_makes_another_plan(name: str) -> None:
    """The digests differ, too, if ranks must agree on the field."""
    plain = PipelinePlan(piped().schedule, piped().deps)
    other = replace(plain, **{name: FIELDS[name]})
    assert other != plain
    assert (other.digest() == plain.digest()) == (name in MAY_DIFFER)


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
    """One iteration is in flight; elsewhere the depth is the last stage + 1, unless set."""
    plan = PipelinePlan.serial(tasks())
    assert {entry.stage for entry in plan.schedule.values()} == {0}
    assert plan.depth == 1
    assert plan.order == ("h2d", "dist", "forward", "backward", "step")
    assert (piped(depth=None).depth, piped(depth=7).depth) == (3, 7)


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
    for said in (
        "key 3",
        "'b'",
        "deps entry ('a',)",
        "deps entry 'ab'",
        "distance of 1 to 1000 iterations",
    ):
        assert said in text


A = PipelineTask("a", print)


def test_an_entry_is_replaced_by_the_task_or_its_name() -> None:
    """It is the first edit that users make; it was refused as "scheduled twice"."""
    plan = PipelinePlan({A: TaskSchedule(), "b": TaskSchedule(1)})
    for key in ("a", A):
        edited = replace(plan, schedule={**plan.schedule, key: TaskSchedule(1, "copy")})
        assert edited.schedule == {"a": TaskSchedule(1, "copy"), "b": TaskSchedule(1)}
        assert edited.tasks == (A,)


def test_a_schedule_is_read_by_the_task_or_its_name() -> None:
    """This holds after a copy, too, and for methods with a default."""
    plan = PipelinePlan({A: TaskSchedule(3), "b": TaskSchedule(1)})
    for schedule in (
        plan.schedule,
        copy.deepcopy(plan).schedule,
        pickle.loads(pickle.dumps(plan.schedule)),
    ):
        assert schedule[A] is schedule["a"]
        assert schedule.get(A) == TaskSchedule(3)
        assert A in schedule
        assert PipelineTask("c", print) not in schedule
        assert schedule.get(PipelineTask("c", print), 5) == 5


def test_a_plan_has_the_tasks_of_its_keys_and_of_its_argument() -> None:
    """A key that was a task once hid all tasks in the argument."""
    b = PipelineTask("b", print)
    assert PipelinePlan({A: TaskSchedule(), "b": TaskSchedule()}, tasks=[A, b]).tasks == (A, b)
    assert PipelinePlan({A: TaskSchedule(), "b": TaskSchedule()}, tasks=[b]).tasks == (b, A)


def test_costs_are_given_and_read_by_the_task_or_its_name() -> None:
    """They behave like a schedule."""
    costs = CostModel({A: TaskCost(3.0)})  # type: ignore[dict-item]
    assert costs.tasks[A] == costs.tasks["a"] == TaskCost(3.0)  # type: ignore[index]
    assert costs.of([A]) == {"a": TaskCost(3.0)}
    assert json.loads(costs.to_json())["tasks"]["a"]["host_us"] == 3.0


def test_wrong_keys_and_types_in_a_file_are_named() -> None:
    """A file that is TOML but no plan says which keys and values are wrong."""
    with pytest.raises(PlanError) as caught:
        PipelinePlan.from_toml('depth = 3\ndeps = 4\n[schedule.a]\nstage = "one"\nlevel = 2\n')
    text = str(caught.value)
    for said in ("'depth'", "deps is 4", "schedule.a.stage is 'one'", "'level' in schedule.a"):
        assert said in text


def test_text_that_does_not_parse_keeps_line_and_column() -> None:
    """Syntax errors come from the parser, with their place."""
    with pytest.raises(tomllib.TOMLDecodeError, match="line 2, column"):
        PipelinePlan.from_toml("[schedule.a]\nstage = = 1\n")
    with pytest.raises(json.JSONDecodeError, match="line 1 column"):
        PipelinePlan.from_json("{schedule}")
    with pytest.raises(PlanError, match="JSON object"):
        PipelinePlan.from_json("[]")
    with pytest.raises(PlanError, match=r"no \[schedule\]"):
        PipelinePlan.from_toml("")


def test_two_tasks_of_one_name_are_seen_to_be_two() -> None:
    """As keys of a schedule they once merged before the second could be refused."""
    one, other = PipelineTask("a", print), PipelineTask("a", len)
    with pytest.raises(PlanError, match="two tasks are named 'a'"):
        PipelinePlan({one: TaskSchedule(), other: TaskSchedule()})
    with pytest.raises(PlanError, match="two tasks are named 'a'"):
        PipelinePlan({one: TaskSchedule()}, tasks=[other])


def test_thread_groups_come_as_tasks_name_them_the_callers_first() -> None:
    """The caller's own is listed even if no task is on it."""
    plan = PipelinePlan(
        {name: TaskSchedule(thread_group=group) for name, group in (("a", "io"), ("b", "dist"))}
    )
    assert plan.thread_groups == ("default", "io", "dist")
