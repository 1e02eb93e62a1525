"""Lookahead assignment: each of its rules, its results, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench import recsys14
from docs.examples.published_planners import assign_lookaheads
from docs.examples.published_planners.lookahead import lookaheads
from docs.examples.published_planners.queue_rules import caller_tasks, communicator_queues
from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import Limits, simulate
from tests.docs.published_planners.papers import paper
from tests.support.budget import seeds
from tests.support.safety import verify_tasks


def chain(
    *tasks: tuple[str, str | None], carried: Sequence[tuple[str, str]] = (), **stages: int
) -> PipelinePlan:
    """Return a chain of tasks, each with its stream, in the last stage except the named ones.

    The host may not run ahead of the device, which would overlap iterations without lookaheads.
    """
    last = max(stages.values(), default=0)
    names = [name for name, _ in tasks]
    return PipelinePlan(
        {name: TaskSchedule(last - stages.get(name, 0), stream) for name, stream in tasks},
        deps=list(zip(names[1:], names, strict=False)),
        cross_iter_deps=carried,
        run_ahead=0,
    )


def device(**us: float) -> CostModel:
    """Return costs of device work alone, in microseconds."""
    return CostModel({name: TaskCost(device_us=time) for name, time in us.items()})


STEP = chain(("copy", "memcpy"), ("dist", "dist"), ("train", None), carried=[("train", "train")])
COSTS = device(copy=50, dist=40, train=100)


def test_preparation_runs_ahead_only_as_far_as_needed() -> None:
    """One period hides all of it; more would only keep more batches in memory."""
    found = assign_lookaheads(STEP, COSTS)
    assert found.lookahead == {"copy": 1, "dist": 1, "train": 0}
    assert found.plan.depth == 2
    assert found.ii_us == simulate(found.plan, COSTS).ii_us == 100
    assert found.why == "190 us become 100 us; raised: copy 0 to 1, dist 0 to 1"


LONG = device(copy=90, dist=80, train=100)
READ = (("read", None), ("copy", "memcpy"), ("train", None))
READ_COSTS = device(read=50, copy=40, train=100)


@pytest.mark.parametrize(
    ("plan", "costs", "limits", "lookahead"),
    [
        # Work that takes longer than a period is divided according to its time.
        (STEP, LONG, Limits(), {"copy": 2, "dist": 1, "train": 0}),
        # Frozen tasks stay, also with a stream, and what comes after them.
        (STEP, COSTS, Limits(frozen=["dist"]), {"copy": 1, "dist": 0, "train": 0}),
        # The caller's tasks stay, wherever they are, and what comes after them.
        (chain(*READ), READ_COSTS, Limits(), {"read": 0, "copy": 0, "train": 0}),
        # A task that needs the step before may run one period ahead and no more; its feed may.
        (
            replace(STEP, cross_iter_deps=[("dist", "train", 1)]),
            device(copy=90, dist=5, train=60),
            Limits(),
            {"copy": 1, "dist": 1, "train": 0},
        ),
        (
            replace(STEP, deps=[("dist", "copy"), ("train", "copy"), ("dist", "train")]),
            COSTS,
            Limits(),
            {"copy": 1, "dist": 0, "train": 0},
        ),
        # A producer at distance 1 is raised to one period less.
        (
            replace(
                STEP,
                schedule={**STEP.schedule, "late": TaskSchedule(stream="side")},
                cross_iter_deps=[("copy", "late", 1), ("train", "train")],
            ),
            device(copy=90, dist=80, train=100, late=1),
            Limits(),
            {"copy": 2, "dist": 1, "train": 0, "late": 1},
        ),
    ],
)  # fmt: skip
def test_how_far_ahead_each_task_runs(
    plan: PipelinePlan, costs: CostModel, limits: Limits, lookahead: dict[str, int]
) -> None:
    """It depends on the task's time, its consumers, and the fixed tasks."""
    found = assign_lookaheads(plan, costs, limits=limits)
    assert found.lookahead == lookahead
    validate(found.plan)


def test_a_dependence_within_a_period_keeps_its_distance() -> None:
    """Its distance depends on the stages: raising the consumer alone would increase it."""
    step = replace(
        STEP,
        schedule={**STEP.schedule, "count": TaskSchedule()},
        same_period_deps=[("copy", "count")],
    )
    costs = device(copy=50, dist=40, train=100, count=1)
    assert assign_lookaheads(step, costs).lookahead["copy"] == 0
    turned = replace(step, same_period_deps=[("count", "copy")])
    assert assign_lookaheads(turned, costs).lookahead["copy"] == 1


COLLECTIVES = PipelinePlan(
    {
        "count": TaskSchedule(globally_ordered=True),
        "dist": TaskSchedule(stream="dist", globally_ordered=True),
        "train": TaskSchedule(),
    },
    deps=[("train", "dist"), ("train", "count")],
    cross_iter_deps=[("train", "train"), ("count", "train")],
    run_ahead=0,
)


def on_communicators(**of: str) -> CostModel:
    """Return the costs of ``COLLECTIVES``, with the communicator of each."""
    times = {"count": 1, "dist": 50, "train": 100}
    return CostModel(
        {n: TaskCost(device_us=us, resources=tuple(of.get(n, ()))) for n, us in times.items()}
    )


def test_no_collective_overtakes_another_of_its_communicator() -> None:
    """The later of two is limited by the earlier one, which is a caller's task."""
    shared = assign_lookaheads(COLLECTIVES, on_communicators(count="x", dist="x"))
    assert shared.lookahead == {"count": 0, "dist": 0, "train": 0}
    unnamed = assign_lookaheads(COLLECTIVES, on_communicators())
    assert unnamed.lookahead == {"count": 0, "dist": 0, "train": 0}
    apart = assign_lookaheads(COLLECTIVES, on_communicators(count="x", dist="y"))
    assert apart.lookahead == {"count": 0, "dist": 1, "train": 0}


@pytest.mark.examples
@pytest.mark.parametrize("streams", [True, False])
def test_random_plans_keep_every_rule_and_become_no_slower(streams: bool) -> None:
    """They verify, have the reported interval, keep limits, and change only stages and order."""
    raised = 0
    for seed in (106, *seeds("plans", 60)):  # 106 has a lookahead that is raised
        given = paper(seed)
        found = assign_lookaheads(given.plan, given.costs, limits=given.limits, streams=streams)
        verify_tasks(found.plan, effects=given.effects, streams=streams)
        before, after = lookaheads(given.plan), lookaheads(found.plan)
        assert after == found.lookahead
        assert all(after[name] >= before[name] for name in before)
        assert all(after[name] == before[name] for name in caller_tasks(given.plan))
        assert found.plan.depth <= given.limits.in_flight
        assert found.ii_us == simulate(found.plan, given.costs, streams=streams).ii_us
        assert found.ii_us <= simulate(given.plan, given.costs, streams=streams).ii_us
        for name, entry in found.plan.schedule.items():
            assert replace(entry, stage=0) == replace(given.plan.schedule[name], stage=0)
        queues = communicator_queues(resolve_plan(given.plan), given.costs)
        assert communicator_queues(resolve_plan(found.plan), given.costs) == queues
        raised += after != before
    assert raised


@pytest.mark.parametrize(("run_ahead", "ii_us", "depth"), [(0, 124_490, 2), (None, 108_380, 1)])
def test_lookaheads_of_the_published_step(run_ahead: int | None, ii_us: int, depth: int) -> None:
    """The next batch's collectives hold up those of this one, unless the host is far ahead."""
    plan = replace(recsys14.plan(), run_ahead=run_ahead)
    found = assign_lookaheads(plan, recsys14.costs(), limits=recsys14.limits())
    assert (found.ii_us, found.plan.depth) == (ii_us, depth)
    assert all(found.lookahead[name] == 0 for name in recsys14.FROZEN)


# ---------------------------------------------------------------------------------- bad input


def test_limits_that_allow_nothing_name_the_least_that_would() -> None:
    """These are stages beyond the iterations in flight, and too many thread groups."""
    deep = chain(("copy", "memcpy"), ("dist", "dist"), ("train", None), copy=3)
    with pytest.raises(PlanError, match="limit is 2 iterations in flight: allow 4"):
        assign_lookaheads(deep, COSTS, limits=Limits(in_flight=2))
    assert assign_lookaheads(deep, COSTS, limits=Limits(in_flight=4)).plan.depth == 4
    groups = {n: replace(e, thread_group=n) for n, e in STEP.schedule.items()}
    with pytest.raises(PlanError, match="limit is 3, .* allow 4"):
        assign_lookaheads(replace(STEP, schedule=groups), COSTS, limits=Limits(groups=3))


def test_frozen_tasks_must_be_in_place() -> None:
    """They must be in the last stage, on the caller's thread."""
    deep = chain(("copy", "memcpy"), ("dist", "dist"), ("train", None), copy=3)
    with pytest.raises(PlanError, match="'copy' is frozen, but runs 3 ahead"):
        assign_lookaheads(deep, COSTS, limits=Limits(frozen=["copy"]))
    groups = {n: replace(e, thread_group="io") for n, e in STEP.schedule.items()}
    with pytest.raises(PlanError, match="'train' is frozen, but in the thread group 'io'"):
        assign_lookaheads(replace(STEP, schedule=groups), COSTS, limits=Limits(frozen=["train"]))
