"""Predicted against measured intervals: tasks that block for known times, within 5%.

The times are those that the sleeps really took in the run at hand. Predictions from costs that were
measured ahead of a run are held against it in ``tests.bench.predict``.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.plans import simulate
from swpipe.profiler import CostModel, TaskCost
from tests.bench.interval import CASES, Case, ms_per_period
from tests.bench.timed_device import TimedDevice
from tests.profiler.sleepers import Sleeper, sleepers

BAR = 0.05


def predicted_within(attempts: int, measure: Callable[[], tuple[float, float]]) -> None:
    """Measure until prediction and run agree; other work may spoil a measurement, not all."""
    found = []
    for _ in range(attempts):
        predicted, measured = measure()
        if abs(predicted - measured) <= BAR * measured:
            return
        found.append((predicted, measured))
    raise AssertionError(f"(predicted, measured) in ms: {found}")


def took_us(sleeper: Sleeper) -> float:
    """How long it slept, on average."""
    return fmean(sleeper.took_s) * 1e6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_the_interval_of_three_and_four_thread_groups(case: Case) -> None:
    """Threads that wait for each other, a cycle through three of them."""

    def measure() -> tuple[float, float]:
        tasks, truth = sleepers(**case.ms)
        with SWPipeline(case.plan, tasks, device="cpu") as pipe:
            measured = ms_per_period(pipe, 20)
        costs = CostModel({name: TaskCost(took_us(fn)) for name, fn in truth.items()})
        return simulate(case.plan, costs, streams=False).ii_us / 1e3, measured

    predicted_within(3, measure)


def test_the_interval_of_streams_that_take_known_times() -> None:
    """Device work that waits across three streams, and host work that takes no time."""
    plan = PipelinePlan(
        {
            "copy": TaskSchedule(0, stream="memcpy"),
            "dist": TaskSchedule(1, stream="dist"),
            "forward": TaskSchedule(2),
            "step": TaskSchedule(2),
        },
        deps=[("dist", "copy"), ("forward", "dist"), ("step", "forward")],
        cross_iter_deps=[("forward", "step"), ("dist", "step", 2)],
        pipeline_depth=4,
    )

    def measure() -> tuple[float, float]:
        _, truth = sleepers(copy=5, dist=7, forward=4, step=5)
        with TimedDevice() as device:
            tasks = [PipelineTask(name, launching(device, fn)) for name, fn in truth.items()]
            with SWPipeline(plan, tasks, device=device) as pipe:
                measured = ms_per_period(pipe, 20)
        costs = {name: TaskCost(0.0, device_us=took_us(fn)) for name, fn in truth.items()}
        return simulate(plan, CostModel(costs)).ii_us / 1e3, measured

    predicted_within(3, measure)


def launching(device: TimedDevice, sleeper: Sleeper) -> Callable[[object], None]:
    """Give the current stream something to sleep over, and return."""

    def fn(ctx: object) -> None:
        device.launch(lambda: sleeper(None))  # type: ignore[arg-type]

    return fn
