"""How the planning commands choose among plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe.cli import plan_work as planning
from swpipe.cli.click_commands import format_outcome
from swpipe.cli.workload import Workload
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import Effects, Location
from swpipe.inference import Recording
from swpipe.planning import Choice, Limits, auto_plan

TASKS = [PipelineTask("read", lambda ctx: None), PipelineTask("train", lambda ctx: None)]
WORK = Workload("work", tuple(TASKS), lambda count: iter(range(count)), {}, {}, "cpu")


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
    chosen, tried_us = planning._fastest(WORK, finalists)
    assert tried_us == pytest.approx(1e3 * took_ms[best])
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


# ------------------------------------------------------------------------------ several ranks


def test_a_plan_is_as_fast_as_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best here may keep another rank, and with it all of them, waiting."""
    finalists = {name: replace(choice(), why=(name,)) for name in ("one", "two")}

    def tried(*given: Any, **options: Any) -> dict[str, float]:
        return {"one": 0.010, "two": 0.012}

    monkeypatch.setattr("swpipe.profiler.try_plans", tried)
    ranked = replace(WORK, over_ranks=lambda own: [own, {"one": 0.015, "two": 0.011}])
    assert planning._fastest(WORK, finalists)[0].why[0] == "one"
    chosen, _ = planning._fastest(ranked, finalists)
    assert chosen.why == ("two", "Tried side by side: one 15.000 ms, two 12.000 ms.")


def test_what_tasks_touch_on_any_rank_counts() -> None:
    """Here they have nothing in common; elsewhere one reads what the other wrote."""

    def ranks(own: Recording) -> list[Recording]:
        place = Location("table", persistent=True)
        there = {
            "read": Effects(writes=frozenset({place})),
            "train": Effects(reads=frozenset({place})),
        }
        return [own, replace(own, effects=there)]

    alone = planning.record_workload(WORK)
    assert planning.inferred_plan(WORK, alone).deps == ()
    together = planning.record_workload(replace(WORK, over_ranks=ranks))
    assert planning.inferred_plan(WORK, together).deps == (("train", "read"),)
    assert together.tasks == WORK.tasks


def test_tasks_that_are_known_to_communicate_take_turns() -> None:
    """Though nothing of the kind was seen; and the plan can be sent, since it has no tasks."""
    work = replace(WORK, ordered=frozenset({"train"}))
    plan = planning.inferred_plan(work, planning.record_workload(work))
    assert [entry.globally_ordered for entry in plan.schedule.values()] == [False, True]
    assert plan.tasks == ()


def test_a_task_costs_its_mean_over_the_ranks() -> None:
    """A wait for a rank that comes late does not count on top of what that rank was doing."""
    slow = CostModel({task.name: TaskCost(host_us=1e6) for task in TASKS})
    work = replace(WORK, over_ranks=lambda own: [own, slow])
    costs = planning.measure_workload(work, PipelinePlan.serial(TASKS))
    assert all(5e5 < cost.host_us < 9e5 for cost in costs.tasks.values())


def test_all_ranks_take_the_plan_of_rank_0() -> None:
    """They might come to another one: numba may not be installed everywhere."""

    def ranks(own: Any) -> list[Any]:
        return [replace(own, why=("rank 0's",)), own] if isinstance(own, Choice) else [own]

    planned = planning.plan_workload(replace(WORK, over_ranks=ranks), Limits(threads=1))
    assert planned.choice.why[0] == "rank 0's"


def test_what_came_of_a_plan_is_told_beside_the_model_and_the_trial() -> None:
    """A model leaves out that cores are shared; a trial does not, and is over sooner."""
    planned = planning.Planned(replace(choice(), ii_us=8e3), CostModel({}), False, tried_us=10e3)
    run: Any = SimpleNamespace(steps_per_s=80.0)
    assert format_outcome(planned, run) == (
        "auto: expected 8.000 ms per step (+56.2%), tried 10.000 ms per step (+25.0%), got 12.500"
    )
    assert "tried" not in format_outcome(replace(planned, tried_us=None), run)
