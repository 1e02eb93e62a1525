"""The memory of tasks, as data."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PULL
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.errors import PlanError

MEMORY = TaskMemory(
    (
        Block(PULL, "step", 4, "batch", removed=True),
        Block("read", "", 8, "x"),
        Block("step", "step", 100, later=1),
    ),
    {"read": 1, "step": -50},
)


def test_costs_carry_it_in_their_file() -> None:
    """They are saved as JSON and read back."""
    costs = CostModel({"read": TaskCost(1), "step": TaskCost(2)}, memory=MEMORY)
    assert CostModel.from_json(costs.to_json()) == costs


def test_what_a_serial_loop_holds() -> None:
    """For a block that the next iteration frees, the previous iteration's counts, too."""
    assert MEMORY.held(["read", "step"]) == [4 + 8 + 100, 4 + 8 + 2 * 100, 4 + 100]
    assert MEMORY.serial_peak(["read", "step"]) == 162


def test_the_mean_of_costs_has_the_largest() -> None:
    """Only the known ones count."""
    one, none = CostModel({"read": TaskCost(1), "step": TaskCost(2)}, memory=MEMORY), TaskMemory()
    assert (
        CostModel.mean([one, CostModel(one.tasks), CostModel(one.tasks, memory=none)]).memory
        == MEMORY
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("3", "costs.memory is 3: it must be a table"),
        ('{"blocks": [{"begun": "a"}], "working": {}}', "has no begin; it has: begun"),
        ('{"blocks": [{"begin": "a", "bytes": -1}], "working": {}}', "bytes is an integer of 0"),
        ('{"blocks": [{"begin": "a", "later": 2}], "working": {}}', "later 0 or 1"),
        ('{"blocks": [], "working": {"a": "much"}}', "working.a is 'much': it must be of type int"),
        ('{"blocks": [{"begin": "<b>", "bytes": 1}], "working": {}}', "it is no task's name"),
    ],
)
def test_other_data_is_refused(data: Any, message: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(PlanError, match=message):
        CostModel.from_json(f'{{"tasks": {{}}, "memory": {data}}}')
