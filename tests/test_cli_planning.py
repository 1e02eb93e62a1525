"""How the planning commands choose among plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe.cli import planning
from swpipe.cli.workload import Workload
from swpipe.costs import CostModel, TaskCost
from swpipe.plans import Choice, Limits, auto_plan

TASKS = [PipelineTask("read", lambda ctx: None), PipelineTask("train", lambda ctx: None)]
WORK = Workload("work", tuple(TASKS), lambda: iter(range(9)), {}, {}, None)


def choice(threads: int = 2) -> Choice:
    """A plan for two tasks, on two threads unless there is one."""
    plan = PipelinePlan({"read": TaskSchedule(), "train": TaskSchedule()}, deps=[("train", "read")])
    costs = CostModel({task.name: TaskCost(host_us=1000) for task in TASKS})
    return auto_plan(plan, costs, limits=Limits(threads=threads), streams=False)


@pytest.mark.parametrize(
    ("took_ms", "best"),
    [
        ({"planned": 10.0, "ready-made": 10.04}, "ready-made"),
        ({"planned": 10.0, "ready-made": 10.2}, "planned"),
        ({"planned": 10.2, "ready-made": 10.0}, "ready-made"),
    ],
)
def test_ties_go_to_the_ready_made_plan(
    monkeypatch: pytest.MonkeyPatch, took_ms: dict[str, float], best: str
) -> None:
    """It is known to work; one that is half a percent faster in a trial is no better."""
    finalists = {name: replace(choice(), why=(name,)) for name in took_ms}
    took_s = {name: ms / 1e3 for name, ms in took_ms.items()}

    def tried(*given: Any, **options: Any) -> dict[str, float]:
        return took_s

    monkeypatch.setattr("swpipe.profiler.try_plans", tried)
    chosen = planning._fastest(WORK, finalists)
    assert chosen.why[0] == best
    assert "planned" in chosen.why[-1]
    assert "ready-made" in chosen.why[-1]


def test_threads_get_an_iteration_of_slack() -> None:
    """One more in flight than the model asks for, said in the reasons, within the limit."""
    lean = choice()
    assert lean.threads == 2
    slack = planning.with_slack(lean, Limits())
    assert slack.in_flight == slack.plan.depth == lean.in_flight + 1
    assert "evens out" in slack.why[-1]
    assert planning.with_slack(lean, Limits(in_flight=lean.in_flight)) is lean


def test_one_thread_needs_no_slack() -> None:
    """Nobody else can be late."""
    alone = choice(threads=1)
    assert planning.with_slack(alone, Limits()) is alone
