"""The order that a compiled program guarantees, compared with clocks of real runs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.plan import PULL
from swpipe.core.resolved import resolve_plan
from swpipe.program import ADMIT, RETIRE, compile_plan
from tests.device.virtual import VirtualDevice
from tests.device.virtual.clocks import Clock, Stamp
from tests.device.virtual.stream_queues import Item
from tests.support.budget import seeds
from tests.support.plans_for_tests import piped
from tests.support.strategies import random_case, worked_case

PLANS = 40


class Watch:
    """Tasks that record in each run what their thread and their stream know.

    Attributes:
        called: (task, iteration) to the clock of its thread when it was called.
        returned: (task, iteration) to the step with which it returned.
        items: (task, iteration) to its piece of device work.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self.called: dict[tuple[str, int], Clock] = {}
        self.returned: dict[tuple[str, int], Stamp] = {}
        self.items: dict[tuple[str, int], Item] = {}
        self._device = device

    def tasks(self, names: Iterable[str]) -> list[PipelineTask]:
        """Return a task for each name."""
        return [PipelineTask(name, partial(self._run, name)) for name in names]

    def _run(self, name: str, ctx: IterContext) -> None:
        device, run = self._device, (name, ctx.iter_idx)
        self.called[run] = device.clocks.now()
        with device.lock:
            self.items[run] = device.queues.submit(device.current_stream())
        self.returned[run] = device.clocks.step()


def watched(plan: PipelinePlan, iterations: int, seed: int) -> Watch:
    """Return the clocks of one run on the virtual device."""
    device = VirtualDevice(seed)
    watch = Watch(device)
    tasks = watch.tasks(plan.schedule)
    with SWPipeline(plan, tasks, device=device, stall_timeout_s=None) as pipe:
        # Drained: the pull that finds the end of the data would wait for the device once more.
        full = iterations >= plan.depth
        iterator = iter(range(iterations + full))
        found = [pipe.progress(iterator) for _ in range(iterations - plan.depth + 1)]
        found += pipe.drain() if full else pipe.iterate(iterator)
        assert len(found) == iterations
    assert not device.violations
    return watch


def random_plans() -> Iterable[PipelinePlan]:
    """Yield plans of all kinds; half of them lack the dependences that their work needs."""
    for seed in seeds("plans", PLANS):
        case = random_case(seed, 6) if seed % 3 else worked_case(seed, 6)
        plan = replace(case.plan, keep=None)
        if seed % 2:
            keep = random.Random(seed).random()
            kept = [p for p in plan.deps if random.Random(repr((seed, p))).random() < keep]
            plan = replace_lists(plan, deps=kept)
        yield plan


def replace_lists(plan: PipelinePlan, **changes: object) -> PipelinePlan:
    """Return the plan with some of its lists changed."""
    return PipelinePlan.from_dict({**plan.to_dict(), **changes})


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_the_order_is_what_the_clocks_of_a_run_know(distance: int) -> None:
    """They agree for every pair of tasks in the shortest run that has both iterations."""
    sure = 0
    for seed, plan in enumerate(random_plans()):
        before = HappensBefore.of(resolve_plan(plan), streams=True)
        watch = watched(plan, abs(distance) + 1, seed)
        i = max(0, -distance)
        for a, b in product(plan.schedule, repeat=2):
            first, then = (a, i), (b, i + distance)
            host = watch.returned[first].before(watch.called[then])
            device = first != then and watch.items[first].stamp.before(watch.items[then].clock)
            told = before.host(a, b, distance), before.device(a, b, distance)
            assert told == (host, device), f"{a} to {b}: {plan}"
            sure += host + device
    assert sure > 5 * PLANS if distance >= 0 else sure > PLANS // 10


@pytest.mark.examples
@pytest.mark.slow
def test_what_holds_in_the_shortest_run_holds_in_longer_ones() -> None:
    """This holds for every pair of iterations of a run of five."""
    refuted = 0
    for seed, plan in enumerate(random_plans()):
        before = HappensBefore.of(resolve_plan(plan), streams=True)
        watch = watched(plan, 5, seed)
        for a, b, d in product(plan.schedule, plan.schedule, (-1, 0, 1)):
            if (a, d) != (b, 0):
                pairs = [((a, i), (b, i + d)) for i in range(5) if 0 <= i + d < 5]
                for first, then in pairs:
                    if before.host(a, b, d):
                        assert watch.returned[first].before(watch.called[then])
                    if before.device(a, b, d):
                        assert watch.items[first].stamp.before(watch.items[then].clock)
                refuted += not before.device(a, b, d)
    assert refuted > PLANS


def two_streams(**more: object) -> PipelinePlan:
    """Return a plan of tasks a and b on two streams, both on the caller's thread."""
    return PipelinePlan(
        schedule={"a": TaskSchedule(stream="left"), "b": TaskSchedule(stream="right")},
        order=["a", "b"],
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("group", ["default", "io"])
def test_a_launch_limit_orders_the_device(group: str, ahead: int) -> None:
    """When an iteration is admitted, the one ``depth + run_ahead`` before it is done.

    Any thread that continues from there knows it.
    """
    plan = two_streams(pipeline_depth=3, run_ahead=ahead)
    first = TaskSchedule(stream="left", thread_group=group)
    before = HappensBefore.of(
        resolve_plan(replace(plan, schedule={**plan.schedule, "a": first})), streams=True
    )
    assert not before.device("b", "a", 3 + ahead - 1)
    assert before.device("b", "a", 3 + ahead)


def test_an_event_that_may_not_be_recorded_yet_orders_nothing() -> None:
    """A program without its host waits has none of the order that its events would give."""
    program = compile_plan(resolve_plan(piped()), streams=True)
    assert HappensBefore(program).device("dist", "forward", 0)
    lanes = [
        replace(lane, instructions=tuple(replace(i, host_waits=()) for i in lane.instructions))
        for lane in program.lanes
    ]
    careless = HappensBefore(replace(program, lanes=tuple(lanes)))
    assert not careless.device("dist", "forward", 0)
    assert not careless.host("dist", "forward", 0)


def test_an_iteration_is_framed_by_its_admission_and_its_retirement() -> None:
    """This is an order on the host; and retirement waits for all device work."""
    before = HappensBefore.of(resolve_plan(piped()), streams=True)
    for name in piped().schedule:
        assert before.host(ADMIT, name, 0)
        assert before.host(name, RETIRE, 0)
        assert before.device(name, RETIRE, 0)


@pytest.mark.parametrize("group", [None, "loader"])
def test_a_call_of_the_loader_comes_after_what_is_before_it_on_the_callers_stream(
    group: str | None,
) -> None:
    """It is the stream of the loader's device work. Other work of the loader is done at return."""
    plan = replace(piped(), pull_group=group, pipeline_depth=5)
    before = HappensBefore.of(resolve_plan(plan), streams=True)
    assert before.keeps(PULL, "h2d", 0)
    assert before.keeps("step", PULL, 5)
    assert not before.keeps("step", PULL, 1)
    beside = replace(plan, schedule={**plan.schedule, "step": TaskSchedule(2, "side")})
    assert HappensBefore.of(resolve_plan(beside), streams=True).device("step", PULL, 5)
    assert not HappensBefore.of(resolve_plan(beside), streams=True).device("step", PULL, 4)


def test_a_call_of_the_loader_is_on_its_own_thread() -> None:
    """It comes after the tasks that its thread has run before it, and admission need not."""
    schedule = {"a": TaskSchedule(thread_group="loader"), "b": TaskSchedule(1)}
    plan = PipelinePlan(schedule, deps=[("b", "a")], pull_group="loader")
    before = HappensBefore.of(resolve_plan(plan), streams=False)
    assert not before.keeps("a", PULL, 1)
    assert before.keeps("a", PULL, 2)
    assert not before.keeps("a", ADMIT, 2)


def test_an_edge_to_an_iteration_that_may_not_exist_orders_nothing() -> None:
    """The consumer waits for the iteration after its own, which the last one does not have.

    B on i waits for A on i + 1, and A on i + 1 for C on i; so B would come after C on its own
    iteration, were there always one more.
    """
    plan = PipelinePlan(
        schedule={
            "a": TaskSchedule(stage=0, stream="left"),
            "b": TaskSchedule(stage=1, stream="right"),
            "c": TaskSchedule(stage=0, stream="third"),
        },
        same_period_deps=[("b", "a")],
        cross_iter_deps=[("a", "c", 1)],
        order=["c", "a", "b"],
    )
    before = HappensBefore.of(resolve_plan(plan), streams=True)
    assert before.device("a", "b", -1)
    assert before.device("c", "a", 1)
    assert not before.device("c", "b", 0)
    assert before.host("c", "b", 0)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_two_tasks_may_run_beside_each_other_as_far_apart_as_the_depth_allows(depth: int) -> None:
    """From a depth of 3 on, they overlap two iterations apart, but never one apart."""
    schedule = {"ahead": TaskSchedule(0, thread_group="io"), "last": TaskSchedule(1)}
    plan = PipelinePlan(schedule, same_period_deps=[("last", "ahead")], pipeline_depth=depth)
    before = HappensBefore.of(resolve_plan(plan), streams=False)
    assert before.host("ahead", "last", -1)
    for distance in (0, 1):
        assert before.never_beside("last", "ahead", distance) == (depth == 2)
