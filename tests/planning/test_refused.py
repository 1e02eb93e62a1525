"""Calls that simulators and planners refuse, with the error and its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from docs.examples.published_planners import assign_lookaheads, joint_search, list_schedule
from swpipe import PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.errors import PlanError
from swpipe.planning import Limits, lower_bounds, simulate
from swpipe.planning.modulo.auto import auto_plan
from swpipe.profiler import CostModel, TaskCost

LOOP = PipelinePlan({"read": TaskSchedule(), "work": TaskSchedule()}, deps=[("work", "read")])
COSTS = CostModel({"read": TaskCost(1), "work": TaskCost(1)})


@pytest.mark.parametrize("planner", [auto_plan, assign_lookaheads, joint_search])
def test_a_frozen_task_that_the_plan_lacks_is_refused(planner: Callable[..., Any]) -> None:
    """Otherwise a misspelt name would have no effect."""
    told = "freeze 'wrok', which the plan does not have .it has: read"
    with pytest.raises(PlanError, match=told):
        planner(LOOP, COSTS, limits=Limits(frozen=["wrok"]))


@pytest.mark.parametrize(
    "planner", [simulate, lower_bounds, auto_plan, list_schedule, assign_lookaheads, joint_search]
)
def test_every_task_needs_a_cost_and_the_plan_can_run(planner: Callable[..., Any]) -> None:
    """The error has the task's name; costs of other tasks do not matter."""
    with pytest.raises(PlanError, match="task 'work' has no cost"):
        planner(LOOP, CostModel({"read": TaskCost(), "other": TaskCost()}))
    with pytest.raises(PlanError, match="cycle"):
        planner(replace(LOOP, deps=[("work", "read"), ("read", "work")]), COSTS)


def with_stream(stream: Any) -> PipelinePlan:
    return replace(LOOP, schedule={**LOOP.schedule, "read": TaskSchedule(0, stream)})


OF_OTHERS = CostModel(COSTS.tasks, memory=TaskMemory((Block("reed", "", 1),)))

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: simulate(LOOP, COSTS, iterations=0), ValueError, "iterations is 0"),
    (lambda: simulate(LOOP, OF_OTHERS), PlanError, "memory is given for tasks reed: measure"),
    (lambda: lower_bounds(LOOP, COSTS, threads=0), ValueError, "threads is 0"),
    (lambda: lower_bounds(PipelinePlan({}), COSTS), PlanError, "the plan is empty"),
    (
        lambda: auto_plan(replace(LOOP, streams={"copies": StreamSpec()}), COSTS),
        PlanError,
        "no task names it",
    ),
    *(
        (lambda one=one: auto_plan(LOOP, COSTS, effort=one), ValueError, "it must be above 0")  # type: ignore[misc]
        for one in (0, -1, float("nan"))
    ),
    (
        lambda: auto_plan(LOOP, COSTS, limits=Limits(max_bytes=1)),
        PlanError,
        "max_bytes needs what the tasks hold",
    ),
    (lambda: Limits(max_bytes=0), PlanError, "max_bytes is 0: give a number of bytes, 1 or more"),
    (
        lambda: assign_lookaheads(with_stream(torch.Stream(device="cpu")), COSTS),
        PlanError,
        "'read': its stream is a torch.Stream",
    ),
    (lambda: joint_search(LOOP, COSTS, beam_width=0), ValueError, "beam_width is 0: give an int"),
    (lambda: joint_search(LOOP, COSTS, rounds=-1), ValueError, "rounds is -1: give an integer of"),
    (lambda: joint_search(LOOP, COSTS, patience=0), ValueError, "patience is 0: give an integer"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """The error has the value, the rule and the fix."""
    with pytest.raises(error, match=words):
        call()
