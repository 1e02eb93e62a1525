"""The limits that a planner must keep."""

from __future__ import annotations

import pytest

from swpipe import PipelineTask
from swpipe.errors import PlanError
from swpipe.planning import Limits


def test_frozen_takes_tasks_and_names() -> None:
    """Tasks and names are accepted; a single string is one name."""
    task = PipelineTask("step", lambda ctx: None)
    assert Limits(frozen=[task, "forward"]).frozen == ("step", "forward")
    assert Limits(frozen="step").frozen == ("step",)


def test_wrong_limits_are_refused() -> None:
    """The error lists all; without a limit a planner would try each of a billion depths."""
    with pytest.raises(PlanError) as raised:
        Limits(0, 1.5, (3,))  # type: ignore[arg-type]
    texts = [problem.text for problem in raised.value.problems]
    assert texts == [
        "the limit in_flight is 0: give an integer from 1 to 1000",
        "the limit groups is 1.5: give an integer from 1 to 1000",
        "frozen has 3, which is neither a task nor a task's name",
    ]
    for number in (True, 1001, 2**70):
        for limits in ({"in_flight": number}, {"groups": number}):
            with pytest.raises(PlanError, match="give an integer from 1 to 1000"):
                Limits(**limits)
