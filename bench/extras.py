"""The costs of recording a trace, compiling a plan and simulating one; without bars."""

from __future__ import annotations

import random
from itertools import pairwise

from bench.dispatch import plan, us_per_task
from bench.measure import Row, Spread, compared, interleaved, timed_ms
from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe._engine.program import compile_plan
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning.simulation.interval import Interval, interval_of
from swpipe.planning.simulation.timed_graph import timed_graph


def trace_row(rounds: int, iterations: int) -> Row:
    """Dispatch with a trace being recorded, beside dispatch without."""
    with SWPipeline(plan(("read", "copy", "default"), depth=5), device="cpu") as pipe:

        def traced() -> float:
            with pipe.trace():
                return us_per_task(pipe, iterations)

        on, off = interleaved(rounds, traced, lambda: us_per_task(pipe, iterations))
    return compared("recording a trace, 3 thread groups", on, off, "us/task", "off")


def layered(tasks: int) -> PipelinePlan:
    """A plan of many tasks: stages of ten, five groups, each task after two of the stage before."""
    draw = random.Random(tasks)
    names = [f"t{i:03}" for i in range(tasks)]
    sooner = {i: names[10 * (i // 10 - 1) : 10 * (i // 10)] for i in range(10, tasks)}
    groups = ("default", "read", "copy", "dist", "cache")
    return PipelinePlan(
        schedule={
            name: TaskSchedule(i // 10, stream=f"s{i % 3}", thread_group=groups[i % 5])
            for i, name in enumerate(names)
        },
        deps=[(names[i], producer) for i in sooner for producer in draw.sample(sooner[i], 2)],
        cross_iter_deps=[(names[i], names[-1], tasks // 10 + 1) for i in range(0, tasks, 20)],
    )


def compile_row(tasks: int, rounds: int) -> Row:
    """Time to compile a plan with streams, in ms."""
    big = layered(tasks)
    took = timed_ms(rounds, lambda: compile_plan(resolve_plan(big), streams=True))
    return Row(what=f"compiling a plan of {tasks} tasks", ours=f"{Spread.of(took).text()} ms")


def simulate_row(rounds: int) -> Row:
    """Time for the interval of a plan of 14 tasks, in ms: a planner asks thousands of times."""
    names = [f"t{n}" for n in range(14)]
    streams, groups = ("memcpy", "dist", None), ("io", "io", "default")
    chain = PipelinePlan(
        {
            name: TaskSchedule(n // 5, streams[n // 5], groups[n // 5])
            for n, name in enumerate(names)
        },
        deps=list(pairwise(reversed(names))),
        cross_iter_deps=[("t10", "t13")],
    )
    costs = CostModel({name: TaskCost(50.0, device_us=300.0) for name in names})
    program = compile_plan(resolve_plan(chain), streams=True)

    def interval() -> Interval:
        return interval_of(timed_graph(program, costs))

    took = timed_ms(rounds, interval, repeats=10)
    return Row(what="the interval of a plan of 14 tasks", ours=f"{Spread.of(took).text()} ms")


def rows(rounds: int = 7, iterations: int = 500) -> list[Row]:
    """Rows without bars."""
    return [
        trace_row(rounds, iterations),
        compile_row(14, rounds),
        compile_row(200, min(rounds, 3)),
        simulate_row(rounds),
    ]
