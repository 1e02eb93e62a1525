"""The simulator compared with the engine on a virtual clock: equal to the nanosecond.

Nothing is contended here: the order at one moment is the host's choice, and has no effect. If the
order of launches matters, no two threads launch at one moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from bench import recsys14
from docs.examples.published_planners import assign_lookaheads, joint_search
from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import DEFAULT_GROUP
from swpipe.core.resolved import resolve_plan
from swpipe.planning import auto_plan
from swpipe.planning.simulation.simulator import simulate
from swpipe.planning.simulation.timed_graph import timed_graph
from swpipe.plans.torchrec.hstu_schedule import HSTU_THREAD_MAPS, hstu_plan, hstu_schedule
from swpipe.program import ADMIT, OWN, SOURCES, Program, compile_plan
from swpipe.trace.span import Row, Span
from tests.support.budget import seeds
from tests.support.cpu_on import CpuOn
from tests.support.strategies import random_case, worked_case
from tests.support.virtual_clock import TimedDevice, TimedHost, tasks_that_take, tell_time

ITERATIONS = 12
LONG = 80
"""Iterations after which nearly every plan has settled."""

LONGEST_CYCLE = 12
"""The most iterations after which a steady state repeats."""

STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["cpu", "streams"])


def random_plan(seed: int) -> PipelinePlan:
    """Return a random plan in which only the caller's thread submits to the caller's stream.

    Every third plan has groups of several workers.
    """
    plan = replace((worked_case if seed % 3 == 1 else random_case)(seed).plan, keep=None)
    schedule = {
        name: replace(entry, stream="own")
        if entry.stream is None and entry.thread_group != DEFAULT_GROUP
        else entry
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule)


def random_costs(seed: int, plan: PipelinePlan) -> CostModel:
    """Return costs in whole microseconds; some tasks take no time, some block."""
    rng = random.Random(seed)

    def time_us() -> int:
        return rng.choice((0, rng.randint(1, 20), rng.randint(1, 50)))

    return CostModel(
        {
            name: TaskCost(time_us(), device_us=time_us(), blocks=rng.random() < 0.2)
            for name in plan.schedule
        }
    )


def costs_of_launches(seed: int, plan: PipelinePlan) -> CostModel:
    """Return costs with which no two tasks launch together; many use a communicator, or two."""
    rng = random.Random(seed)

    def cost() -> TaskCost:
        return TaskCost(
            rng.randint(1, 50_000) / 1e3,
            device_us=rng.choice((0, rng.randint(1, 50_000) / 1e3)),
            resources=rng.choice(((), ("nccl",), ("nccl", "pcie"), ("pcie",))),
            blocks=rng.random() < 0.2,
        )

    costs = {name: cost() for name in plan.schedule}
    return CostModel({n: c if c.device_us else replace(c, resources=()) for n, c in costs.items()})


class Loop:
    """A pipeline on a virtual clock, whose tasks take exactly their costs."""

    def __init__(
        self, plan: PipelinePlan, costs: CostModel, *, streams: bool, seed: int = 0
    ) -> None:
        self.host = TimedHost(seed)
        self.device = TimedDevice(self.host) if streams else None
        self.pipe = SWPipeline(
            plan,
            tasks_that_take(costs, self.host, self.device),
            device=self.device or CpuOn(self.host),
            stall_timeout_s=None,
        )

    def spans(self, iterations: int) -> tuple[Span, ...]:
        """Return the trace of a whole run."""
        with pytest.MonkeyPatch.context() as monkeypatch, self.pipe as pipe:
            tell_time(monkeypatch, self.host, self.device)
            with pipe.trace() as trace:
                pipe.run(range(iterations))
        return trace.spans

    def retired_ns(self, iterations: int) -> list[int]:
        """Return when each iteration was retired and done on the device, in the steady state."""
        with pytest.MonkeyPatch.context() as monkeypatch, self.pipe as pipe:
            tell_time(monkeypatch, self.host, self.device)
            data, found = iter(range(iterations + pipe.plan.depth)), []
            for _ in range(iterations):
                pipe.progress(data)
                done_ns = self.device.current_stream().end_ns if self.device else 0
                found.append(max(self.host.now_ns, done_ns))
        return found


def interval_us(retired_ns: list[int]) -> float | None:
    """Return the steady interval over a whole cycle; None if the run has not settled."""
    for cycle in range(1, LONGEST_CYCLE + 1):
        steps = {
            late - early
            for early, late in zip(retired_ns, retired_ns[cycle:], strict=False)
            if early >= retired_ns[-4 * LONGEST_CYCLE]
        }
        if len(steps) == 1:
            return steps.pop() / cycle / 1e3
    return None


def turns(spans: Iterable[Span]) -> dict[tuple[str, int, Row], tuple[int, ...]]:
    """Return what both show of each turn: start, end and wait, or only the end.

    A trace counts back-pressure as part of ``<admit>``. Its device spans begin when the task's
    function does, though the work may be submitted later.
    """
    return {
        (span.task, span.iteration, span.row): (span.end_ns,)
        if span.task == ADMIT or span.row.kind == "stream"
        else (span.start_ns, span.end_ns, span.wait_ns)
        for span in spans
    }


@pytest.mark.examples
@STREAMS
def test_every_task_starts_and_ends_at_the_simulated_time(streams: bool) -> None:
    """Random plans agree from fill to drain, and so does the wait of each thread.

    If a device holds back admission, the engine finds the end of the data only when the device is
    done; the simulator knows it: later events are left out.
    """
    for seed in seeds("plans", 24):
        plan = random_plan(seed)
        costs = random_costs(seed, plan)
        found = turns(Loop(plan, costs, streams=streams, seed=seed).spans(ITERATIONS))
        last = ITERATIONS - plan.depth if streams else ITERATIONS - 1
        simulated = simulate(plan, costs, streams=streams, iterations=ITERATIONS).spans
        for turn, times in turns(span for span in simulated if span.iteration <= last).items():
            assert found[turn] == times, (seed, turn)


@pytest.mark.examples
def test_device_work_is_done_in_the_order_of_launch() -> None:
    """This holds on the caller's stream, and for a communicator on several streams and threads.

    Two cases are not compared: plans in which the engine gives the caller's stream a wait for an
    event when a task begins, and another thread its work before that task launches; and the end of
    the work of a task that blocks, for which a trace takes the event when the task returns.
    """
    queues = 0
    for seed in seeds("plans", 40):
        plan = random_case(seed).plan
        program = compile_plan(resolve_plan(plan), streams=True)
        if waits_on_a_shared_stream(program):
            continue
        costs = costs_of_launches(seed, plan)
        found = turns(Loop(plan, costs, streams=True, seed=seed).spans(ITERATIONS))
        simulated = simulate(plan, costs, iterations=ITERATIONS).spans
        last = ITERATIONS - plan.depth
        for turn, times in turns(span for span in simulated if span.iteration <= last).items():
            task, _, row = turn
            if row.kind == "thread" or not costs.tasks[task].blocks:
                assert found[turn] == pytest.approx(times, abs=2), (seed, turn)
        queues += bool(timed_graph(program, costs).queues)
    assert queues > 8


def waits_on_a_shared_stream(program: Program) -> bool:
    """Return whether several threads use the caller's stream, with an event wait there."""
    there = [ins for ins in program.instructions.values() if ins.stream is None]
    waits = [wait for ins in there if ins.task not in OWN for wait in ins.event_waits]
    several = len({ins.lane for ins in there if ins.task not in SOURCES}) > 1
    return several and any(wait.producer not in SOURCES for wait in waits)


@pytest.mark.examples
@STREAMS
def test_the_steady_interval_is_the_simulated_one(streams: bool) -> None:
    """Random plans agree over a whole cycle of the steady state."""
    settled = 0
    for seed in seeds("plans", 12):
        plan = random_plan(seed)
        costs = random_costs(seed, plan)
        found_us = interval_us(Loop(plan, costs, streams=streams, seed=seed).retired_ns(LONG))
        if found_us is not None:
            settled += 1
            assert found_us == pytest.approx(simulate(plan, costs, streams=streams).ii_us), seed
    assert settled > 9


@pytest.mark.parametrize(
    ("planner", "run_ahead"), [(assign_lookaheads, 0), (joint_search, None), (auto_plan, 0)]
)
def test_what_planners_promise_of_the_published_step_is_kept(
    planner: Callable[..., Any], run_ahead: int | None
) -> None:
    """Its collectives run in the order of launch, on any stream."""
    costs = recsys14.costs()
    plan = replace(recsys14.plan(), run_ahead=run_ahead)
    found = planner(plan, costs, limits=recsys14.limits())
    assert interval_us(Loop(found.plan, costs, streams=True).retired_ns(LONG)) == found.ii_us


@pytest.mark.parametrize("threads", HSTU_THREAD_MAPS)
def test_the_plan_of_hstu_has_the_depth_that_it_needs(threads: str) -> None:
    """By the published costs it takes 111 ms at most; more depth or run-ahead gains nothing."""
    schedule = hstu_schedule(prefetch=True, prefetch_depth=1, shuffled=True)
    plan = hstu_plan(schedule, threads)
    costs = recsys14.hstu_costs()
    found_us = interval_us(Loop(plan, costs, streams=True).retired_ns(LONG))
    assert found_us == simulate(plan, costs).ii_us <= 111e3
    for more in (replace(plan, run_ahead=3), replace(plan, pipeline_depth=plan.depth + 2)):
        assert simulate(more, costs).ii_us >= 0.999 * found_us
    assert simulate(replace(plan, run_ahead=0), costs).ii_us > 1.1 * found_us


@STREAMS
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_interval_at_every_depth(depth: int, streams: bool) -> None:
    """Too shallow a pipeline waits for its oldest iteration."""
    plan = PipelinePlan(
        {
            "copy": TaskSchedule(0, "memcpy" if streams else None, "io"),
            "train": TaskSchedule(min(depth - 1, 1)),
        },
        deps=[("train", "copy")],
        pipeline_depth=depth,
    )
    costs = CostModel({"copy": TaskCost(4, device_us=30), "train": TaskCost(9, device_us=40)})
    found_us = interval_us(Loop(plan, costs, streams=streams).retired_ns(LONG))
    assert found_us == pytest.approx(simulate(plan, costs, streams=streams).ii_us)
