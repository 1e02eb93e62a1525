"""The properties of a plan are derived once."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.core import resolved
from swpipe.core.dependence import CycleError
from swpipe.core.resolved import ResolvedPlan, resolve_plan
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped, task, tasks

A_B = {"a": TaskSchedule(), "b": TaskSchedule()}


def test_making_a_pipeline_resolves_its_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing and tracing use the results of then; two sorts are enough."""
    calls = []

    def counted(of: Any, name: str) -> None:
        was = getattr(of, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return was(*args, **options)

        monkeypatch.setattr(of, name, call)

    counted(ResolvedPlan, "__init__")
    counted(resolved, "dependences_of")
    counted(resolved, "topological")
    given = list(reversed(tasks()))  # neither order is that of the declaration
    with SWPipeline(piped(), given, device="cpu") as pipe:
        pipe.format_schedule(3)
        pipe.format_stage_analysis()
        with pipe.trace():
            pass
    assert sorted(calls) == ["__init__", "dependences_of", "topological", "topological"]


def test_dependences_have_distance_and_lag() -> None:
    """Dependences within an iteration and those that order a period are distinct."""
    plan = PipelinePlan(
        {"a": TaskSchedule(), "b": TaskSchedule(1), "c": TaskSchedule(1)},
        deps=[("b", "a"), ("c", "b")],
        cross_iter_deps=[("a", "c")],
    )
    found = resolve_plan(plan)
    assert [dep[:4] for dep in found.dependences] == [
        ("b", "a", 0, 1),
        ("c", "b", 0, 0),
        ("a", "c", 1, 0),
    ]
    assert found.period_order == ("b", "c", "a")
    assert found.serial_order == ("a", "b", "c")


def test_the_serial_order_is_as_given_where_it_may() -> None:
    """The order of the tasks counts, then that of the schedule; a dependence outranks both."""
    assert resolve_plan(PipelinePlan(A_B), ["b", "a"]).serial_order == ("b", "a")
    assert resolve_plan(PipelinePlan(A_B)).serial_order == ("a", "b")
    assert resolve_plan(PipelinePlan(A_B, deps=[("a", "b")])).serial_order == ("b", "a")


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        (PipelinePlan(A_B, deps=[("a", "b"), ("b", "a")]), "within an iteration"),
        (PipelinePlan(A_B, [("a", "b")], same_period_deps=[("b", "a")]), "within an iteration"),
        (
            PipelinePlan(
                {"a": TaskSchedule(), "b": TaskSchedule(1)},
                cross_iter_deps=[("a", "b")],
                same_period_deps=[("b", "a")],
            ),
            "within a period",
        ),
        (PipelinePlan(A_B, deps=[("a", "b")], order=["a", "b"]), "order contradicts"),
    ],
)
def test_a_cycle_says_what_forms_it(plan: PipelinePlan, cause: str) -> None:
    """It names the dependences of an iteration, those of a period, or the plan's order."""
    with pytest.raises(CycleError, match="after") as caught:
        resolve_plan(plan)
    assert str(caught.value) in ("'a' after 'b' after 'a'", "'b' after 'a' after 'b'")
    with pytest.raises(PlanError, match=cause):
        validate(plan)


def test_a_plan_of_many_tasks_is_compared_pair_by_pair_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no task declares a state, nothing is compared to find races."""
    from swpipe.analysis import happens_before

    monkeypatch.setattr(happens_before, "_Walk", None)  # a call would raise
    names = [f"t{n}" for n in range(100)]
    plan = PipelinePlan({name: TaskSchedule(thread_group=name[:2]) for name in names})
    SWPipeline(plan, [task(name) for name in names], device="cpu").close()
