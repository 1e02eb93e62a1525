"""Cost models: files, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swpipe.core.costs import CostModel, TaskCost
from swpipe.errors import PlanError

MODEL = CostModel(
    {
        "copy": TaskCost(host_us=30, gil_us=10, device_us=300, resources=("h2d",)),
        "item": TaskCost(host_us=3, device_us=2, blocks=True),
        "free": TaskCost(),
    },
    handover_us=20,
)


def test_json_gives_an_equal_model_back(tmp_path: Path) -> None:
    """This holds for text and file."""
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    MODEL.save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == MODEL


def test_a_cost_file_of_a_schedulable_pipeline_is_read() -> None:
    """Its two times are the host's and the device's."""
    read = CostModel.from_json(
        '{"h2d": {"cpu_us": 1.5, "gpu_us": 300}, "step": {"cpu_us": 0, "gpu_us": 2}}'
    )
    assert read == CostModel(
        {"h2d": TaskCost(1.5, device_us=300), "step": TaskCost(0, device_us=2)}
    )
    with pytest.raises(PlanError, match="host_us is -1"):
        CostModel.from_json('{"h2d": {"cpu_us": -1, "gpu_us": 300}}')


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_us", -1),
        ("gil_us", math.nan),
        ("device_us", math.inf),
        ("host_us", "3"),
    ],
)
def test_a_cost_is_a_time(key: str, value: Any) -> None:
    """Negative numbers and non-numbers are refused, with the task and the value."""
    with pytest.raises(PlanError, match=f"task 'a': {key} is"):
        CostModel({"a": TaskCost(**{"host_us": 0, key: value})})


def test_all_that_is_wrong_is_told_at_once() -> None:
    """The error lists every cost, a lock that is held longer than the task, and wrong names."""
    with pytest.raises(PlanError) as caught:
        CostModel(
            {
                "a": TaskCost(host_us=-1),
                "b": TaskCost(host_us=1, gil_us=2),
                "c": TaskCost(resources=["x"]),  # type: ignore[arg-type]
                "d": 3,  # type: ignore[dict-item]
                "e": TaskCost(blocks=1),  # type: ignore[arg-type]
            },
            handover_us=-2,
        )
    names = [("a",), ("b",), ("c",), ("d",), ("e",), ()]
    assert [p.tasks for p in caught.value.problems] == names


def test_missing_costs_are_named() -> None:
    """The error lists all of them, and the existing ones."""
    with pytest.raises(PlanError, match=r"task 'gone' has no cost \(there are costs for: copy"):
        MODEL.of(["copy", "gone"])


def test_the_mean_of_models_is_that_of_each_time() -> None:
    """A task of the mean uses, and is blocked by, all that it is in any of them."""
    other = CostModel(
        {
            "free": TaskCost(host_us=8),
            "copy": TaskCost(50, 0, 100, ("nic",)),
            "item": TaskCost(5, 0, 4),
        },
        handover_us=10,
    )
    assert CostModel.mean([MODEL, other]) == CostModel(
        {
            "copy": TaskCost(40, 5, 200, ("h2d", "nic")),
            "item": TaskCost(4, 0, 3, blocks=True),
            "free": TaskCost(host_us=4),
        },
        handover_us=15,
    )


def test_a_mean_is_of_models_of_the_same_tasks() -> None:
    """A model that lacks a task is an error; at least one model is needed."""
    with pytest.raises(PlanError, match="task 'free' has no cost"):
        CostModel.mean([MODEL, CostModel({"copy": TaskCost()})])
    with pytest.raises(ValueError, match="models is empty"):
        CostModel.mean([])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", r"costs is \[\]: it must be a table"),
        ('{"tasks": {"a": 3}}', "tasks.a is 3"),
        ('{"tasks": {"a": {"hots_us": 3}}}', "unknown key 'hots_us'"),
        ('{"tasks": {}, "tusks": 1}', "tusks"),
        ('{"tasks": {"a": {"resources": "x"}}}', "a.resources is 'x': it must be a list"),
    ],
)
def test_json_that_is_no_cost_model_is_refused(text: str, says: str) -> None:
    """The error says where."""
    with pytest.raises(PlanError, match=says):
        CostModel.from_json(text)


TABLES = CostModel(
    {
        "read": TaskCost(host_us=12, host_each_us=(2, 22)),
        "train": TaskCost(host_us=1, device_us=5, device_each_us=(4, 6)),
        "even": TaskCost(host_us=3),
    }
)


def test_tables_go_to_a_file_and_back() -> None:
    """Files without tables are read as before."""
    assert CostModel.from_json(TABLES.to_json()) == TABLES
    assert (TABLES.iterations, MODEL.iterations) == (2, 0)
    assert "each_us" not in MODEL.to_json()
    each = [(one.host_us, one.device_us) for one in TABLES.tasks["train"].each(2)]
    assert each == [(1, 4), (1, 6)]


def test_tables_of_unequal_length_are_refused() -> None:
    """The error has each length; a table with non-times is an error of its task."""
    text = TABLES.to_json().replace("22", "22, 9")
    rule = "the tables of all tasks are of the same sampled iterations"
    lengths = r"read.host_each_us 3, train.device_each_us 2"
    with pytest.raises(PlanError, match=rf"tables have different lengths \({lengths}\): {rule}"):
        CostModel.from_json(text)
    for table, error in (([2, -1], "task 'a': host_each_us is"), ("ab", "must be a list")):
        with pytest.raises(PlanError, match=error):
            CostModel.from_json(json.dumps({"tasks": {"a": {"host_us": 1, "host_each_us": table}}}))


def test_means_and_scaled_costs_keep_their_tables() -> None:
    """They are kept by iteration; of models with tables of different length only the means are."""
    twice = TABLES.with_scaled({"read": 2.0})
    assert twice.tasks["read"].host_each_us == (4, 44)
    mean = CostModel.mean([TABLES, twice])
    assert mean.tasks["read"] == TaskCost(host_us=18, host_each_us=(3, 33))
    assert mean.tasks["train"] == TABLES.tasks["train"]
    short = CostModel({**TABLES.tasks, "read": TaskCost(8), "train": TaskCost(2)})
    assert CostModel.mean([TABLES, short]).iterations == 0
