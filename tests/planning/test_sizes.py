"""Plans that take too long to plan, simulate or draw are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.errors import PlanError
from swpipe.planning import auto_plan, lower_bounds, simulate
from swpipe.planning.simulation import cycles
from swpipe.trace.span import Panel, Row, Span
from swpipe.trace.timeline import plot


def long_plan(tasks: int, stages: int = 1) -> tuple[PipelinePlan, CostModel]:
    """Return a chain of tasks over some stages, and its costs."""
    names = [f"t{k}" for k in range(tasks)]
    plan = PipelinePlan({name: TaskSchedule(k * stages // tasks) for k, name in enumerate(names)})
    return plan, CostModel({name: TaskCost(host_us=1.0) for name in names})


def test_more_than_a_thousand_tasks_are_not_planned() -> None:
    """The search took minutes, silently."""
    with pytest.raises(PlanError, match="1001 tasks, but at most 1000 are planned: join some"):
        auto_plan(*long_plan(1001))


def test_too_many_steps_are_not_simulated() -> None:
    """Tasks and depth are each within their limits; both together took minutes."""
    plan, costs = long_plan(2000, stages=2)
    assert simulate(plan, costs, iterations=1).iterations == 1
    plan, costs = long_plan(2001, stages=2)
    with pytest.raises(PlanError, match="in flight are 4002, but at most 4000"):
        simulate(plan, costs)


def test_the_search_for_a_cycle_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks form a loop, in an order that is against their dependences."""
    names = [f"t{k}" for k in range(200)]
    plan = PipelinePlan(
        {name: TaskSchedule() for name in names},
        deps=[*zip(names[1:], names, strict=False)],
        cross_iter_deps=[(names[0], names[-1], 1)],
    )
    costs = CostModel({name: TaskCost(host_us=1.0) for name in names})
    assert lower_bounds(plan, costs, streams=False).rec_mii_us == pytest.approx(200.0)
    monkeypatch.setattr(cycles, "MOST_STEPS", 100)
    with pytest.raises(PlanError, match="cycles of 404 steps take too long to search: use fewer"):
        lower_bounds(plan, costs, streams=False)


@pytest.mark.parametrize(("rows", "spans"), [(101, 101), (1, 5001)])
def test_a_picture_has_a_largest_size(tmp_path: Path, rows: int, spans: int) -> None:
    """Drawing took minutes and gigabytes."""
    many = [Span("a", k, Row("thread", f"g{k % rows}"), 10 * k, 10 * k + 5) for k in range(spans)]
    with pytest.raises(ValueError, match=f"{rows} rows and {spans} spans do not fit a picture"):
        plot([Panel("", many)], tmp_path / "out.svg")


def test_an_unknown_task_is_told_with_some_that_are_known() -> None:
    """The message once had all of ten thousand names."""
    plan, _ = long_plan(1000)
    tasks = [PipelineTask(name, lambda ctx: None) for name in plan.schedule]
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        with pytest.raises(ValueError, match="no task 'x'; it has t0, .* and 988 more") as caught:
            pipe.task_names("x")
    assert len(str(caught.value)) < 200
