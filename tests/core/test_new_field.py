"""A field that is added to ``TaskSchedule`` is kept and compared without further changes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench import recsys14
from docs.examples.published_planners import assign_lookaheads, joint_search, list_schedule
from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe._distributed.agreement import differences, plan_facts
from swpipe.inference.recording import Recording
from swpipe.planning import Limits
from swpipe.planning.modulo.auto import auto_plan


@dataclass(frozen=True, slots=True)
class Extended(TaskSchedule):
    """A schedule with a field of each type that a file can hold."""

    weight: int = 1
    cores: tuple[int, ...] = ()
    note: str | None = None


@pytest.fixture(autouse=True)
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``TaskSchedule`` in the library by the extended class."""
    for name, module in list(sys.modules.items()):
        if (
            name.startswith(("swpipe.", "bench."))
            and vars(module).get("TaskSchedule") is TaskSchedule
        ):
            monkeypatch.setattr(module, "TaskSchedule", Extended)


def paper() -> PipelinePlan:
    """Return the paper's plan, with a weight for each task."""
    plan = recsys14.plan()
    schedule = {
        name: Extended(
            entry.stage,
            entry.stream,
            entry.thread_group,
            entry.globally_ordered,
            weight=10 + number,
            cores=(number, 2),
            note=name,
        )
        for number, (name, entry) in enumerate(plan.schedule.items())
    }
    return replace(plan, schedule=schedule)


def added(plan: PipelinePlan) -> dict[str, Any]:
    """Return the values of the new fields, by task."""
    entries: Any = plan.schedule
    return {name: (entry.weight, entry.cores, entry.note) for name, entry in entries.items()}


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_it_goes_to_a_file_and_back(tmp_path: Path, suffix: str) -> None:
    """It may have any value; a default is not written."""
    path = tmp_path / f"plan{suffix}"
    paper().save(path)
    assert PipelinePlan.load(path) == paper()
    assert added(PipelinePlan.load(path)) == added(paper())
    PipelinePlan({"a": Extended()}).save(path)
    assert "weight" not in path.read_text()
    assert PipelinePlan.load(path) == PipelinePlan({"a": Extended()})


def test_ranks_must_agree_on_it() -> None:
    """The digest counts it, and the difference is named."""
    name = next(iter(paper().schedule))
    changed: dict[str, Any] = {"weight": 7, "cores": (9,)}
    moved = replace(paper().schedule[name], **changed)
    other = replace(paper(), schedule={**paper().schedule, name: moved})
    assert other.digest() != paper().digest()
    assert "weight 7, cores (9,)" in differences([plan_facts(paper()), plan_facts(other)])
    assert "weight=7, cores=(9,)" in repr(other)


def test_published_planners_keep_it() -> None:
    """Lists, lookaheads and the joint search move tasks, and keep everything else."""
    costs, limits = recsys14.costs(), recsys14.limits()
    plans = [
        list_schedule(paper(), costs).plan,
        assign_lookaheads(paper(), costs, limits=limits).plan,
        joint_search(paper(), costs, limits=limits, rounds=1).plan,
    ]
    assert [added(plan) for plan in plans] == [added(paper())] * 3


def test_the_planner_keeps_it() -> None:
    """Stages and thread groups are new; everything else is the plan's."""
    costs = recsys14.costs()
    found = auto_plan(paper(), costs, limits=Limits(), effort=0.01, streams=False).plan
    assert found.schedule != paper().schedule
    assert added(found) == added(paper())


def test_new_plans_have_it() -> None:
    """The serial plan and the inferred one have it, with its default."""
    tasks = tuple(PipelineTask(name, print) for name in "ab")
    inferred = Recording(tasks, {}, {}, frozenset(), ()).plan()
    for plan in (PipelinePlan.serial(tasks), inferred):
        assert added(plan) == dict.fromkeys("ab", (1, (), None))
