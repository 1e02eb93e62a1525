"""Simulated timelines and intervals: properties of random plans, and cases with known results."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

import swpipe.planning.simulation.interval
from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PULL
from swpipe.core.resolved import resolve_plan
from swpipe.planning.modulo.bounds import lower_bounds
from swpipe.planning.simulation.cycles import TICKS_PER_US
from swpipe.planning.simulation.event_simulator import UNBOUNDED, EventSimulator, simulate_run
from swpipe.planning.simulation.interval import interval_of
from swpipe.planning.simulation.simulator import Load, Simulation, simulate
from swpipe.planning.simulation.timed_graph import timed_graph
from swpipe.program import RETIRE, compile_plan
from swpipe.trace.span import Span
from tests.support.budget import seeds
from tests.support.strategies import random_case

ITERATIONS = 12


def random_costs(rng: random.Random, plan: PipelinePlan) -> CostModel:
    """Return costs without contention: no lock and no resource."""

    def time_us() -> float:
        return rng.choice((0.0, rng.randint(1, 20), rng.uniform(0, 50)))

    def cost() -> TaskCost:
        return TaskCost(time_us(), device_us=time_us(), blocks=rng.random() < 0.2)

    return CostModel({**{name: cost() for name in plan.schedule}, PULL: TaskCost(time_us())})


def at(simulation: Simulation, task: str, iteration: int, kind: str = "thread") -> Span:
    """Return the span of a task."""
    (span,) = [
        span
        for span in simulation.spans
        if (span.task, span.iteration, span.row.kind) == (task, iteration, kind)
    ]
    return span


def us(span: Span) -> tuple[float, float]:
    """Return start and end in microseconds."""
    return span.start_ns / 1e3, span.end_ns / 1e3


def feeding(depth: int = 2, group: str = "io") -> PipelinePlan:
    """Return a plan that reads ahead while training."""
    return PipelinePlan(
        schedule={"read": TaskSchedule(0, thread_group=group), "train": TaskSchedule(1)},
        deps=[("train", "read")],
        pipeline_depth=depth,
    )


@pytest.mark.examples
@pytest.mark.parametrize("streams", [False, True], ids=["cpu", "streams"])
def test_the_interval_is_that_of_a_long_run(streams: bool) -> None:
    """It is that of the later part of a run of many iterations."""
    for seed in seeds("plans", 24):
        rng = random.Random(seed)
        plan = random_case(seed).plan
        costs = random_costs(rng, plan)
        found = simulate(plan, costs, streams=streams, iterations=160)
        program = compile_plan(resolve_plan(plan), streams=streams)
        interval = interval_of(timed_graph(program, costs))
        assert interval.ii_us == pytest.approx(found.ii_us)
        if found.exact:
            begin, end = (done_us(found, i) for i in (30, 150))  # many patterns divide 120
            assert (end - begin) / 120 == pytest.approx(found.ii_us, rel=2e-3, abs=1e-3), seed


def done_us(simulation: Simulation, iteration: int) -> float:
    """Return when all work of an iteration was done."""
    return max(s.end_ns for s in simulation.spans if s.iteration == iteration) / 1e3


def contended_costs(rng: random.Random, plan: PipelinePlan) -> CostModel:
    """Return costs in which most tasks need the lock, and half of them a resource."""

    def cost() -> TaskCost:
        host = rng.choice((0, rng.randint(1, 20), rng.uniform(0, 50)))
        used = rng.choice(((), ("nccl",), ("nccl", "disk"), ("disk",)))
        return TaskCost(host, rng.uniform(0, host), rng.choice((0, rng.randint(1, 30))), used)

    return CostModel({name: cost() for name in plan.schedule}, rng.choice((0.0, 2.0)))


@pytest.mark.examples
def test_whatever_does_one_thing_at_a_time_does_so() -> None:
    """These are threads, streams, the lock in a part of host work, and a resource in all work."""
    for seed in seeds("plans", 24):
        rng = random.Random(seed)
        plan = random_case(seed).plan
        costs = contended_costs(rng, plan)
        found = simulate(plan, costs, iterations=ITERATIONS)
        held: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for span in found.spans:
            assert span.wait_ns >= 0
            held[span.row].append(us(span))
            cost = costs.tasks.get(span.task, TaskCost())
            begin, end = us(span)
            if span.row.kind == "thread" and cost.gil_us:
                held["lock"].append((end - cost.host_us, end - cost.host_us + cost.gil_us))
            if (span.row.kind == "stream") == (cost.device_us > 0):
                for resource in cost.resources:
                    held[resource].append((begin, end))
        for turns in held.values():
            turns.sort()
            for (_, end), (begin, _) in pairwise(turns):
                assert begin >= end - 2e-3, seed


@pytest.mark.examples
@pytest.mark.parametrize("streams", [False, True], ids=["cpu", "streams"])
def test_an_exact_interval_keeps_repeating(streams: bool) -> None:
    """A run with contention repeats exactly, long after the pattern was found."""
    contended = 0
    for seed in (*seeds("plans", 24), *FALSE_STARTS):
        rng = random.Random(seed)
        plan = random_case(seed).plan
        costs = replace(contended_costs(rng, plan), handover_us=rng.choice((0.0, 2.0, 70.0)))
        graph = timed_graph(compile_plan(resolve_plan(plan), streams=streams), costs)
        found = interval_of(graph)
        if not graph.contended or not found.exact:
            continue
        contended += 1
        run = EventSimulator(graph.limited(), UNBOUNDED)
        ends = [run.retired(i) for i in range(260)]
        patterns = [
            pattern
            for pattern in range(1, LONGEST_PATTERN + 1)
            if all(ends[i] - ends[i - pattern] == ends[-1] - ends[-1 - pattern] for i in LATE)
        ]
        assert patterns, seed
        step = (ends[-1] - ends[-1 - patterns[0]]) / patterns[0] / TICKS_PER_US
        assert found.ii_us == step, seed
    assert contended > 12


LATE = range(210, 260)
LONGEST_PATTERN = 60
FALSE_STARTS = (1660, 1874, 1967, 2047, 2269, 3477)
"""One or two iterations are like those before them, and later ones are not."""


@pytest.mark.examples
def test_an_unbounded_run_starts_like_any_other() -> None:
    """The number of iterations has no effect until the last ones are in flight."""
    for seed in seeds("plans", 16):
        plan = random_case(seed).plan
        costs = contended_costs(random.Random(seed), plan)
        graph = timed_graph(compile_plan(resolve_plan(plan), streams=True), costs)
        graph = graph.limited()
        if graph.contended:
            endless, played = (
                EventSimulator(graph, UNBOUNDED),
                simulate_run(graph, 3 * graph.depth + 10),
            )
            assert [endless.retired(i) for i in range(10)] == [played.retired(i) for i in range(10)]


# -------------------------------------------------------------------------------- in words


def test_the_busier_of_two_threads_sets_the_interval() -> None:
    """The other idles for the rest of each interval."""
    found = simulate(feeding(), CostModel({"read": TaskCost(30), "train": TaskCost(20)}))
    assert found.ii_us == 30.0
    assert {load.name: (load.busy_us, load.idle) for load in found.loads} == {
        "io": (30.0, 0.0),
        "default": (20.0, pytest.approx(1 / 3)),
        "caller's": (0.0, 1.0),
    }


def test_a_thread_that_waited_wakes_later() -> None:
    """It wakes ``handover_us`` later, on the way from read to train."""
    costs = CostModel({"read": TaskCost(10), "train": TaskCost(5)}, handover_us=2)
    found = simulate(feeding(), costs, streams=False)
    assert us(at(found, "train", 0))[0] == us(at(found, "read", 0))[1] + 2


def test_a_host_that_may_not_run_ahead_is_reported_as_a_cycle_through_admission() -> None:
    """At depth 1 the device idles while the host launches, unless the host may run ahead."""
    plan = PipelinePlan({"train": TaskSchedule()}, pipeline_depth=1, run_ahead=0)
    costs = CostModel({"train": TaskCost(5, device_us=50)})
    found = simulate(plan, costs)
    assert found.ii_us == 55.0
    assert "<retire> i -> <admit> (host) i+1" in found.limit
    for ahead in (None, 1):
        assert simulate(replace(plan, run_ahead=ahead), costs).ii_us == 50.0


def test_the_lock_is_granted_in_order_of_requests() -> None:
    """Both threads run Python all the time: their times add up."""
    costs = CostModel({"read": TaskCost(30, 30), "train": TaskCost(20, 20)})
    found = simulate(feeding(), costs, streams=False)
    assert (found.ii_us, found.exact) == (50.0, True)
    assert found.limit == "the interpreter lock, always taken: read, train"


def test_only_the_part_that_needs_the_lock_waits_for_it() -> None:
    """Work that does not need it runs in parallel."""
    costs = CostModel({"read": TaskCost(30, 10), "train": TaskCost(20, 10)})
    assert simulate(feeding(depth=4), costs, streams=False).ii_us == 30.0


def test_a_named_resource_is_used_by_one_at_a_time() -> None:
    """Two streams share one communicator."""
    plan = PipelinePlan(
        {"dist": TaskSchedule(0, stream="net"), "reduce": TaskSchedule(1)},
        deps=[("reduce", "dist")],
        pipeline_depth=4,
    )
    both = {
        "dist": TaskCost(1, device_us=40, resources=("nccl",)),
        "reduce": TaskCost(1, device_us=30, resources=("nccl",)),
    }
    found = simulate(plan, CostModel(both))
    assert found.ii_us == 70.0
    assert found.limit == "resource 'nccl', always taken: reduce, dist"
    alone = {name: TaskCost(1, device_us=c.device_us) for name, c in both.items()}
    assert simulate(plan, CostModel(alone)).ii_us == 40.0


def test_host_work_gets_a_resource_when_it_asks_first() -> None:
    """A thread and a stream compete; the stream's own work keeps the order of launch."""
    plan = PipelinePlan(
        {"read": TaskSchedule(thread_group="io"), "copy": TaskSchedule()}, pipeline_depth=3
    )
    costs = CostModel(
        {
            "read": TaskCost(10, resources=("disk",)),
            "copy": TaskCost(4, device_us=20, resources=("disk",)),
        }
    )
    found = simulate(plan, costs)
    assert us(at(found, "read", 0)) == (0.0, 10.0)
    assert us(at(found, "copy", 0, "stream")) == (10.0, 30.0)
    assert found.ii_us == 30.0


def test_a_task_that_blocks_returns_when_its_device_work_is_done() -> None:
    """The device then waits for the host, on any thread."""
    plan = PipelinePlan({"train": TaskSchedule(), "log": TaskSchedule()}, order=["train", "log"])
    tasks = {"train": TaskCost(5, device_us=50), "log": TaskCost(7)}
    assert simulate(plan, CostModel(tasks)).ii_us == 50.0
    costs = CostModel(tasks | {"train": TaskCost(5, device_us=50, blocks=True)})
    found = simulate(plan, costs)
    assert (us(at(found, "train", 0)), us(at(found, "log", 0))) == ((0.0, 55.0), (55.0, 62.0))
    assert at(found, "log", 0).wait_ns == 0
    assert found.ii_us == lower_bounds(plan, costs).ii_us == 62.0
    assert found.loads[0] == Load("default", "thread", 62.0, 0.0)
    assert simulate(plan, costs, streams=False).ii_us == 62.0
    apart = replace(plan.schedule["train"], thread_group="train")
    apart = replace(plan, schedule={**plan.schedule, "train": apart})
    assert simulate(apart, costs).ii_us == 55.0


def test_the_timeline_is_a_trace_and_prints() -> None:
    """Its interval is the simulation's; it has all tasks of the requested iterations."""
    costs = CostModel({"read": TaskCost(3e3), "train": TaskCost(2e3)})
    found = simulate(feeding(), costs, iterations=7)
    assert {s.iteration for s in found.spans if s.task == RETIRE} == set(range(found.iterations))
    assert len([s for s in found.spans if s.task == "read"]) == found.iterations == 7
    trace = found.trace()
    assert "read 0" in trace.format()
    assert trace.initiation_interval_s == pytest.approx(found.ii_us / 1e6)
    text = found.format()
    assert text.startswith("simulated: 3.000 ms per iteration; the first takes 5.000 ms")
    assert "limited by thread 'io', always busy: read" in text


def test_a_cycle_is_reported_with_tasks_and_iterations() -> None:
    """Each of them waits for the previous one."""
    plan = PipelinePlan(
        {
            "prefetch": TaskSchedule(0, thread_group="cache"),
            "forward": TaskSchedule(1, thread_group="compute"),
            "step": TaskSchedule(2),
        },
        deps=[("forward", "prefetch"), ("step", "forward")],
        cross_iter_deps=[("prefetch", "step", 2)],
        pipeline_depth=6,
    )
    times = {"prefetch": TaskCost(10e3), "forward": TaskCost(10e3), "step": TaskCost(8e3)}
    found = simulate(plan, CostModel(times), streams=False)
    assert found.ii_us == 14e3
    assert found.limit == (
        "a cycle, 14.000 ms per iteration: prefetch i -> forward i -> step i -> prefetch i+2"
    )


def test_an_interval_that_never_repeats_is_a_mean() -> None:
    """It is near that of a run several times as long, and is marked as not exact."""
    plan = random_case(3361).plan
    costs = contended_costs(random.Random(3361), plan)
    found = simulate(plan, costs, iterations=400)
    assert not found.exact
    assert "simulated: about 0.044 ms" in found.format()
    begin, end = (done_us(found, i) for i in (100, 350))
    assert (end - begin) / 250 == pytest.approx(found.ii_us, rel=2e-2)


def test_tasks_that_wait_for_each_others_lock_contend() -> None:
    """No thread or resource is always busy, and no cycle of waits is fixed."""
    costs = CostModel({"read": TaskCost(30e3, 20e3), "train": TaskCost(25e3, 20e3)})
    found = simulate(feeding(depth=2), costs, streams=False)
    assert (found.ii_us, found.exact) == (45e3, True)
    assert found.limit == "contention for the interpreter lock"


# -------------------------------------------------------------------------------- refused


def test_tasks_can_cost_nothing() -> None:
    """The interval is 0, and nothing limits it."""
    found = simulate(feeding(), CostModel({"read": TaskCost(), "train": TaskCost()}))
    assert (found.ii_us, found.latency_us, found.limit) == (0.0, 0.0, "nothing")
    assert {load.idle for load in found.loads} == {1.0}


def test_an_uncontended_interval_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planner simulates thousands of times; the bench reports the time of one call."""
    monkeypatch.setattr(swpipe.planning.simulation.interval, "EventSimulator", None)
    costs = CostModel({"read": TaskCost(50.0, device_us=300.0), "train": TaskCost(90.0)})
    program = compile_plan(resolve_plan(feeding(group="default")), streams=True)
    assert interval_of(timed_graph(program, costs)).ii_us == 300.0
