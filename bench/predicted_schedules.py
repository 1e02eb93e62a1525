"""Predicted and measured steps on 2 and 4 ranks: 1F1B, ZBV, V-Min, DualPipe-V.

The passes sleep, as in ``bench.pipeline_parallel``, and take no core: 2 cores suffice for 4 ranks,
if nothing else runs. Each schedule runs on the runtime of ``swpipe``. DualPipe-V runs in sequence
here; ``bench.paired_passes`` measures it with pairs and experts.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist

from bench.measure import Row, Spread, interleaved, off_by, sharpen_timers
from bench.pipeline_parallel import COSTS_MS, FEATURES, Sleeper, costs_of, squared
from swpipe.plans.pipeline_parallel import (
    PipelineSchedule,
    ScheduleReport,
    check_schedule,
    torch_schedule,
)
from swpipe.plans.pipeline_parallel.v_blocks import uniform_orders
from swpipe.plans.pipeline_parallel.v_order import VOrders
from swpipe.plans.pipeline_parallel.v_starts import GreedyOrder
from swpipe.trace import Row as TraceRow
from swpipe.trace import Span

MICROBATCHES = 8
LIMIT = 0.03
"""The limit for the error of the prediction."""


def schedules(n_ranks: int) -> dict[str, PipelineSchedule]:
    """Return the schedules by name; a stage of 1F1B has the work of two stages of the others."""
    return {
        "1F1B": torch_schedule("1f1b", n_ranks, MICROBATCHES),
        "ZBV": torch_schedule("zbv", n_ranks, MICROBATCHES),
        "V-Min": v_min(n_ranks),
        "DualPipe-V": torch_schedule("dualpipev", n_ranks, MICROBATCHES).in_sequence,
    }


def v_min(n_ranks: int) -> PipelineSchedule:
    """Return the order of the building block that needs the least memory."""
    costs = costs_of(2 * n_ranks, 0.0, 1.0)
    limits = (replace(costs, max_mem=2 * passes) for passes in count(2))
    jobs = (VOrders(n_ranks, MICROBATCHES, limited) for limited in limits)
    orders, order = next((job, order) for job in jobs for order in uniform_orders(job))
    return orders.schedule_of(GreedyOrder(orders, order).make())


class Step:
    """A schedule on this rank, with stages that sleep, and the prediction of its step.

    Args:
        name: The schedule's name in ``schedules``.
        scale: The factor of the times of passes.

    Attributes:
        stages: This rank's stages.
        report: The prediction, in ms, from costs that are measured before, as a user would.
    """

    def __init__(self, name: str, scale: float) -> None:
        from swpipe.tasks.pipeline_parallel import PipelineRuntime, measure_costs

        schedule = schedules(dist.get_world_size())[name]
        share = scale * (2 if name == "1F1B" else 1)
        places = enumerate(schedule.placement)
        own = [stage for stage, place in places if place == dist.get_rank()]
        self.stages = {stage: Sleeper(*(cost * share for cost in COSTS_MS)) for stage in own}
        self._data = torch.ones(2 * MICROBATCHES, FEATURES)
        micro = self._data[:2]
        costs = measure_costs(self.stages, schedule.n_stages, lambda _: micro, squared, micro)
        self.report = check_schedule(schedule, replace(costs, max_mem=math.inf))
        self._runtime = PipelineRuntime(schedule, self.stages, squared)
        self.ms()  # headers go with the first step

    def ms(self) -> float:
        """Return the time of a step, from barrier to barrier."""
        dist.barrier()
        begin = time.perf_counter()
        self._runtime.train(self._data, target=self._data)
        dist.barrier()
        return (time.perf_counter() - begin) * 1e3


def on_rank(rounds: int, scale: float) -> dict[str, tuple[float, list[float]]]:
    """Return the predicted and the measured steps of each schedule, in ms."""
    sharpen_timers()
    steps = {name: Step(name, scale) for name in schedules(dist.get_world_size())}
    measured = interleaved(rounds, *(step.ms for step in steps.values()))
    return {
        name: (step.report.makespan, times)
        for (name, step), times in zip(steps.items(), measured, strict=True)
    }


def traced(name: str, scale: float) -> tuple[ScheduleReport, list[Span]]:
    """Return the prediction of one step, and this rank's passes in it."""
    sharpen_timers()
    step = Step(name, scale)
    for stage in step.stages.values():
        stage.slept.clear()
    step.ms()
    row = TraceRow("thread", f"rank {dist.get_rank()}")
    spans = []
    for number, stage in step.stages.items():
        micros: Counter[str] = Counter()
        for op, begin_ns, end_ns in stage.slept:
            # Each stage takes the microbatches in their order.
            spans.append(Span(f"{number}{op}", micros[op], row, begin_ns, end_ns))
            micros[op] += 1
    return step.report, spans


def rows(rounds: int = 7, scale: float = 1.0) -> list[Row]:
    """Return predicted over measured, by schedule and number of ranks."""
    from tests.support.ranks import Ranks

    told = []
    for n_ranks in (2, 4):
        with Ranks(n_ranks, deadline_s=200.0) as ranks:
            of_rank = ranks.run(on_rank, rounds, scale)[0]
        for name, (predicted_ms, times) in of_rank.items():
            told.append(
                Row(
                    f"predicted of a step, {name}, {n_ranks} ranks",
                    f"{predicted_ms:.1f} ms",
                    f"measured {Spread.of(times).text(1)} ms",
                    off_by([predicted_ms] * len(times), times),
                    1 + LIMIT,
                )
            )
    return told
