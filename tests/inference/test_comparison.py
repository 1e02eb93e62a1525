"""The dependences of a plan, compared with those that effects require."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.effects import Effects, EffectTable, Location
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.inference import comparison
from swpipe.inference.comparison import Comparison, needed
from swpipe.inference.orders import Edge, Orders
from swpipe.inference.recording import Recording
from tests.inference.helpers import recorded
from tests.support.budget import seeds
from tests.support.safety import effects_of, random_pair, verify_tasks


def place(name: str) -> Location:
    """Return a location; capital letters are states."""
    return Location(name, persistent=name.isupper())


def table(**tasks: str) -> EffectTable:
    """Return a table of effects from "reads>writes", strings of one-letter locations."""
    return {
        name: Effects(*(frozenset(map(place, part)) for part in text.split(">")))
        for name, text in tasks.items()
    }


CHAIN = table(load=">a", forward="aM>b", backward="b>G", step="GM>M")
DEPS = [("forward", "load"), ("backward", "forward"), ("step", "backward")]


def plan(groups: str = "dddd", **changes: Any) -> PipelinePlan:
    """Return a plan of the chain's tasks in stage 0, each on a group named by a letter."""
    schedule = {
        name: TaskSchedule(thread_group={"d": "default"}.get(group, group))
        for name, group in zip(CHAIN, groups, strict=True)
    }
    return PipelinePlan(**{"schedule": schedule, "pipeline_depth": 2, **changes})


def compare(given: PipelinePlan, effects: EffectTable) -> Comparison:
    """Compare the plan with the effects."""
    return comparison.compare_with_plan(resolve_plan(given), effects)


def edges(found: Any) -> list[tuple[str, str, int]]:
    """Return the dependences without their reasons."""
    return [one[:3] for one in found]


def test_the_fewest_dependences_are_asked_for() -> None:
    """Implied ones are left out: the step comes after forward by way of backward."""
    assert edges(needed(CHAIN)) == [
        ("forward", "load", 0),
        ("backward", "forward", 0),
        ("step", "backward", 0),
        ("forward", "step", 1),
    ]


def test_what_is_missing_is_named_with_the_reason() -> None:
    """The message has the pair, the list for it, and what both access."""
    (one,) = compare(plan("abcd", deps=DEPS), CHAIN).missing
    assert str(one) == '("forward", "step") in cross_iter_deps, for state \'M\''


def test_what_the_schedule_keeps_is_told_apart() -> None:
    """On one thread the plan is right; on two, it is wrong."""
    together = compare(plan(), CHAIN)
    assert together.missing == ()
    assert edges(together.by_schedule) == edges(needed(CHAIN))
    apart = compare(plan("eeed"), CHAIN)
    assert edges(apart.missing) == [("step", "backward", 0), ("forward", "step", 1)]


def test_staleness_that_the_plan_allows_is_accepted() -> None:
    """Forward may read parameters one step behind, if it always does."""
    carried = [("forward", "step", 2), ("backward", "step", 1)]
    late = plan("abcd", deps=DEPS, cross_iter_deps=carried)
    late = replace(late, schedule={**late.schedule, "step": TaskSchedule(1, thread_group="d")})
    always = replace(late, same_period_deps=[("step", "forward")])
    assert edges(compare(always, CHAIN).missing) == [("forward", "step", 1)]
    assert compare(replace(always, stale={"M": 1}), CHAIN).missing == ()
    luck = compare(replace(late, stale={"M": 1}), CHAIN)
    assert edges(luck.missing) == [("forward", "step", 1)]


def test_orders_follow_paths_of_any_distance() -> None:
    """Distances add up, negative ones too; a task comes after itself."""
    orders = Orders("abc", [Edge("b", "a", 1), Edge("c", "b", -1)])
    assert orders.implies(Edge("c", "a", 0))
    assert orders.implies(Edge("c", "a", 3))
    assert not orders.implies(Edge("b", "a", 0))
    assert orders.implies(Edge("a", "a", 1))
    assert not orders.implies(Edge("a", "b", 9))


def test_the_report_has_all_parts() -> None:
    """These are tasks, states, dependences or the comparison, and the notes."""

    def load(ctx: Any) -> None:
        ctx.a = 1

    def use(ctx: Any) -> None:
        ctx.b = ctx.a

    found = recorded(load, use)
    with pytest.raises(PlanError, match="not among the tasks"):
        found.compare(plan())
    alone = str(found.report())
    assert "reads" in alone
    assert '("use", "load") in deps, for ctx.a' in alone
    assert "Never recorded" in alone
    serial = PipelinePlan.serial(found.tasks)
    assert "no dependence is missing" in str(found.report(serial))


def recording(effects: EffectTable, **changes: Any) -> Recording:
    """Return a recording with these effects."""
    found = Recording((), effects, {}, frozenset(), ())
    return replace(found, **changes)


def test_recordings_of_several_ranks_are_taken_together() -> None:
    """A place counts for the tasks that access it on any rank, with all that is known.

    Two tasks that share nothing on one rank depend on each other because of another rank.
    """
    one = recording(
        table(load=">a", count=">T", drop=">"),
        states={"T": ("rows", "both")},
        collectives=frozenset({"load"}),
        notes=("same", "one"),
    )
    other = recording(
        table(load=">a", count=">", drop="T>"),
        states={"T": ("both", "cache")},
        collectives=frozenset({"count"}),
        notes=("same", "other"),
    )
    assert edges(one.dependences().needed) == []
    both = one.together([other])
    assert both.effects == table(load=">a", count=">T", drop="T>")
    assert ("drop", "count", 0) in edges(both.dependences().needed)
    assert both.states == {"T": ("rows", "both", "cache")}
    assert both.collectives == {"load", "count"}
    assert both.notes == ("same", "one", "other")


def test_recordings_of_other_tasks_are_not_taken_together() -> None:
    """The order is part of the recording."""
    one = recording(table(load=">a", step="a>"))
    with pytest.raises(ValueError, match="cannot merge a recording of step, load with one of"):
        one.together([recording(table(step="a>", load=">a"))])


def test_global_order_counts_as_it_does_for_verification() -> None:
    """Two globally ordered tasks in two groups take their turns in the plan's order."""
    effects = table(load=">a", forward="a>b")
    entries = {name: TaskSchedule(thread_group=name, globally_ordered=True) for name in effects}
    for order in (("load", "forward"), ("forward", "load")):
        ordered = PipelinePlan(entries, order=order)
        assert missing_as_verified(ordered, effects) == (order[0] == "forward")


def missing_as_verified(given: PipelinePlan, effects: EffectTable) -> bool:
    """Return whether a dependence is missing; check that verification agrees."""
    missing = bool(compare(given, effects).missing)
    try:
        verify_tasks(given, effects=effects)
    except PlanError:
        assert missing
    else:
        assert not missing
    return missing


@pytest.mark.examples
def test_comparing_and_verifying_agree_on_random_plans() -> None:
    """The plans are right, or have lost a dependence."""
    found = {True: 0, False: 0}
    for seed in seeds("plans", 80):
        given, workload = random_pair(seed)
        found[missing_as_verified(given, effects_of(workload))] += 1
    assert min(found.values()) > 10
