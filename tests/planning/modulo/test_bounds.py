"""Lower bounds: no plan beats them, known plans reach them, and they name their reason."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import lower_bounds, simulate
from tests.planning.simulation.test_simulator import contended_costs, feeding
from tests.support.budget import seeds
from tests.support.strategies import random_case


def loop(*, prefetch_group: str = "cache") -> PipelinePlan:
    """Return a plan whose prefetch reads what the step wrote two iterations earlier."""
    return PipelinePlan(
        {
            "prefetch": TaskSchedule(0, thread_group=prefetch_group),
            "forward": TaskSchedule(1, thread_group="compute"),
            "step": TaskSchedule(2),
        },
        deps=[("forward", "prefetch"), ("step", "forward")],
        cross_iter_deps=[("prefetch", "step", 2)],
        pipeline_depth=6,
    )


def costs(**host_us: float) -> CostModel:
    """Return costs of tasks that only occupy their thread."""
    return CostModel({name: TaskCost(time) for name, time in host_us.items()})


@pytest.mark.examples
def test_no_plan_is_faster_than_its_bounds() -> None:
    """160 random plans show it; if threads are free the bound is not higher."""
    reached = 0
    for seed in seeds("plans", 80):
        rng = random.Random(seed)
        plan = random_case(seed).plan
        model = contended_costs(rng, plan)
        blocking = {n: replace(c, blocks=rng.random() < 0.2) for n, c in model.tasks.items()}
        model = replace(model, tasks=blocking)
        groups = len({entry.thread_group for entry in plan.schedule.values()})
        for streams in (False, True):
            bounds = lower_bounds(plan, model, streams=streams)
            free = lower_bounds(plan, model, streams=streams, threads=groups)
            ii_us = simulate(plan, model, streams=streams, iterations=1).ii_us
            assert ii_us >= bounds.ii_us - 1e-6, seed
            assert free.ii_us <= bounds.ii_us + 1e-6, seed
            reached += ii_us <= bounds.ii_us + 1e-6
    assert reached > 30


def test_threads_may_be_chosen_freely() -> None:
    """All tasks then share them as well as possible, and no task is split."""
    own = lower_bounds(feeding(), costs(read=30, train=20))
    assert (own.ii_us, own.rec_mii_us, own.limiting) == (30.0, 0.0, "thread 'io': read")
    one = lower_bounds(feeding(), costs(read=30, train=20), threads=1)
    two = lower_bounds(feeding(), costs(read=30, train=20), threads=2)
    assert (one.ii_us, one.limiting) == (50.0, "the one thread: all tasks")
    assert (two.ii_us, two.limiting) == (30.0, "one thread: read alone")
    even = lower_bounds(loop(), costs(prefetch=10, forward=9, step=8), threads=2)
    assert (even.res_mii_us, even.busiest) == (17.0, "2 threads: all tasks")


def test_workers_share_the_work_of_their_group() -> None:
    """Four of them read 40 us each, so that one batch comes every 10 us."""
    given = feeding(depth=6)
    schedule = {**given.schedule, "read": replace(given.schedule["read"], workers=4)}
    plan, model = replace(given, schedule=schedule), costs(read=40, train=8)
    bounds = lower_bounds(plan, model, streams=False)
    assert (bounds.ii_us, bounds.limiting) == (10.0, "thread 'io': read")
    assert simulate(plan, model, streams=False).ii_us == 10.0


def test_a_cycle_runs_on_the_device_or_on_the_host() -> None:
    """The host does not wait for the device; therefore the two do not add up."""
    model = CostModel({n: TaskCost(1, device_us=10) for n in ("prefetch", "forward", "step")})
    bounds = lower_bounds(loop(), model, streams=True)
    assert bounds.rec_mii_us == 15.0
    assert bounds.cycle.startswith("a cycle of dependences, by device time: ")
    assert lower_bounds(loop(), model, streams=False).rec_mii_us == 16.5


@pytest.mark.parametrize(
    ("schedule", "cost", "words"),
    [
        ({"stream": "side"}, {"device_us": 9.0}, "stream 'side': a, b"),
        ({}, {"device_us": 9.0}, 'stream "caller\'s": a, b'),
        ({}, {"resources": ("nccl",), "host_us": 9.0}, "resource 'nccl': a, b"),
        ({}, {"gil_us": 9.0, "host_us": 9.0}, "the interpreter lock: a, b"),
        ({"stream": "side"}, {"host_us": 9.0}, "submission to stream 'side': a, b"),
        ({"globally_ordered": True}, {"host_us": 9.0}, "submission in global order: a, b"),
    ],
)
def test_each_resource_bounds_the_interval(
    schedule: dict[str, object], cost: dict[str, object], words: str
) -> None:
    """Two works of 9 us on separate threads are 18 us, and the simulator agrees."""
    plan = PipelinePlan(
        {
            name: TaskSchedule(thread_group=name, **schedule)  # type: ignore[arg-type]
            for name in ("a", "b")
        },
        pipeline_depth=5,
    )
    model = CostModel({name: TaskCost(**cost) for name in ("a", "b")})  # type: ignore[arg-type]
    bounds = lower_bounds(plan, model)
    assert (bounds.ii_us, bounds.limiting) == (18.0, words)
    assert simulate(plan, model).ii_us == pytest.approx(18.0)


def test_dependences_in_the_same_period_count_with_the_distance_of_the_stages() -> None:
    """The caller's task waits for the other thread's task of the next batch."""
    plan = PipelinePlan(
        {"a": TaskSchedule(0, thread_group="io"), "b": TaskSchedule(1)},
        deps=[("b", "a")],
        same_period_deps=[("b", "a")],
        cross_iter_deps=[("a", "b", 2)],
    )
    # b i after a i+1, and a i+2 after b i: one iteration on, and both have run.
    assert lower_bounds(plan, costs(a=3, b=4), streams=False).rec_mii_us == 7.0
    assert simulate(plan, costs(a=3, b=4), streams=False).ii_us == 7.0


def test_they_print_in_two_lines() -> None:
    """The lines name the cause of each."""
    text = lower_bounds(loop(), costs(prefetch=10e3, forward=10e3, step=8e3)).format()
    res, rec = text.splitlines()
    assert res == "ResMII: 10.000 ms, thread 'cache': prefetch"
    assert rec == (
        "RecMII: 14.000 ms, a cycle of dependences, by host time: "
        "prefetch i -> forward i -> step i -> prefetch i+2"
    )
    assert "RecMII: none" in lower_bounds(feeding(), costs(read=1, train=1)).format()
