"""List scheduling: its order, what it does not change, and that no plan gets worse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from docs.examples.published_planners import list_schedule
from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning import simulate
from tests.docs.published_planners.papers import paper
from tests.support.budget import seeds
from tests.support.safety import verify_tasks


def device(**us: float) -> CostModel:
    """Return costs of device work alone, in microseconds."""
    return CostModel({name: TaskCost(device_us=time) for name, time in us.items()})


def on_streams(**streams: str | None) -> dict[str, TaskSchedule]:
    """Return a schedule in which each task is on a stream."""
    return {name: TaskSchedule(stream=stream) for name, stream in streams.items()}


def test_the_longest_path_goes_first() -> None:
    """Of two tasks on one stream, the one that a long task waits for is submitted first."""
    plan = PipelinePlan(
        on_streams(quick="a", key="a", long="b", end=None),
        deps=[("long", "key"), ("end", "long"), ("end", "quick")],
        cross_iter_deps=[("quick", "end"), ("key", "end")],
    )
    costs = device(quick=50, key=10, long=100, end=1)
    found = list_schedule(plan, costs)
    assert found.plan.order.index("key") < found.plan.order.index("quick")
    assert (found.given_ii_us, found.ii_us) == (161, 111)
    assert "161 us becomes 111 us" in found.why


def work(host: float, device: float = 0, gil: float = 0, *resources: str) -> TaskCost:
    """Return a task's cost; times are in microseconds."""
    return TaskCost(host_us=host, gil_us=gil, device_us=device, resources=resources)


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [
        pytest.param(
            (TaskSchedule(stream="a"), work(0, 200)),
            (TaskSchedule(stream="a"), work(0, 90)),
            (TaskSchedule(stream="b"), work(0, 60)),
            id="stream",
        ),
        pytest.param(
            (TaskSchedule(stream="a"), work(0, 200, 0, "pcie")),
            (TaskSchedule(stream="b"), work(0, 90, 0, "pcie")),
            (TaskSchedule(stream="c"), work(0, 60)),
            id="resource",
        ),
        pytest.param(
            (TaskSchedule(thread_group="x"), work(200, 0, 0, "disk")),
            (TaskSchedule(thread_group="y"), work(90, 0, 0, "disk")),
            (TaskSchedule(thread_group="z"), work(60)),
            id="resource of the host",
        ),
        pytest.param(
            (TaskSchedule(thread_group="x"), work(200)),
            (TaskSchedule(thread_group="x"), work(90)),
            (TaskSchedule(thread_group="y"), work(60)),
            id="thread",
        ),
        pytest.param(
            (TaskSchedule(thread_group="x"), work(200, 0, 200)),
            (TaskSchedule(thread_group="y"), work(90, 0, 90)),
            (TaskSchedule(thread_group="z"), work(60)),
            id="interpreter lock",
        ),
    ],
)
def test_busy_resources_are_waited_for(
    first: tuple[TaskSchedule, TaskCost],
    second: tuple[TaskSchedule, TaskCost],
    other: tuple[TaskSchedule, TaskCost],
) -> None:
    """The second task has a longer path than the other, but needs the first one's resource."""
    entries = {"first": first, "second": second, "other": other}
    plan = PipelinePlan({name: entry for name, (entry, _) in entries.items()})
    costs = CostModel({name: cost for name, (_, cost) in entries.items()})
    assert list_schedule(plan, costs).listed == ("first", "other", "second")


def test_communicator_order_is_kept() -> None:
    """A collective with a longer path does not overtake the one before it."""
    schedule = {
        "a": TaskSchedule(stream="a", globally_ordered=True),
        "b": TaskSchedule(stream="b", globally_ordered=True),
        "end": TaskSchedule(),
    }
    plan = PipelinePlan(
        schedule,
        deps=[("end", "a"), ("end", "b")],
        cross_iter_deps=[("a", "end"), ("b", "end")],
        run_ahead=0,
    )
    times = {"a": 10, "b": 100, "end": 1}

    def order(**communicators: str) -> list[str]:
        costs = {
            name: TaskCost(host_us=5, device_us=us, resources=tuple(communicators.get(name, ())))
            for name, us in times.items()
        }
        return list(
            list_schedule(plan, CostModel(costs)).plan.order or resolve_plan(plan).period_order
        )

    assert order(a="x", b="x") == ["a", "b", "end"]
    assert order() == ["a", "b", "end"]  # none is named: they are taken to share one
    assert order(a="x", b="y") == ["b", "a", "end"]


@pytest.mark.examples
@pytest.mark.parametrize("streams", [True, False])
def test_no_plan_becomes_worse_or_wrong(streams: bool) -> None:
    """Each result verifies, has the reported interval, is no slower; only the order changes."""
    better = 0
    for seed in seeds("plans", 20):
        given = paper(seed)
        found = list_schedule(given.plan, given.costs, streams=streams)
        assert replace(found.plan, order=given.plan.order) == given.plan
        verify_tasks(found.plan, effects=given.effects, streams=streams)
        before = simulate(given.plan, given.costs, streams=streams).ii_us
        after = simulate(found.plan, given.costs, streams=streams).ii_us
        assert (found.given_ii_us, found.ii_us) == (before, after)
        assert after <= before
        better += after < before
    assert better
