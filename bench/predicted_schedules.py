"""Steps as the checker predicts them, beside steps on 2 and 4 ranks: 1F1B, ZBV, V-Min, DualPipe-V.

The passes sleep, as in ``bench.pipeline_parallel``, and take no core: 2 cores suffice for 4 ranks,
if nothing else runs. Each schedule runs on the runtime of ``swpipe``. DualPipe-V runs in sequence
here; with pairs and experts it is measured by ``bench.paired_passes``.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from bench.measure import Row, Spread, interleaved, off_by, sharpen_timers
from bench.pipeline_parallel import COSTS_MS, FEATURES, Sleeper, costs_of, squared
from swpipe.plans.pipeline_parallel import PipelineSchedule, check_schedule, torch_schedule
from swpipe.plans.pipeline_parallel.v_blocks import block_orders
from swpipe.plans.pipeline_parallel.v_order import VOrders

MICROBATCHES = 8
LIMIT = 0.03
"""How far the prediction may be off."""


def schedules(n_ranks: int) -> dict[str, PipelineSchedule]:
    """Return the schedules by name; a stage of 1F1B has the work of two stages of the others."""
    costs = replace(costs_of(2 * n_ranks, 0.0, 1.0), max_mem=math.inf)
    v_min, _ = block_orders(n_ranks, MICROBATCHES)
    return {
        "1F1B": torch_schedule("1f1b", n_ranks, MICROBATCHES),
        "ZBV": torch_schedule("zbv", n_ranks, MICROBATCHES),
        "V-Min": VOrders(n_ranks, MICROBATCHES, costs).schedule_of(v_min),
        "DualPipe-V": torch_schedule("dualpipev", n_ranks, MICROBATCHES).in_sequence,
    }


def on_rank(rounds: int, scale: float) -> dict[str, tuple[float, list[float]]]:
    """Return the predicted step, and the measured ones, of each schedule, in ms."""
    from swpipe.tasks.pipeline_parallel import PipelineRuntime, measure_costs

    sharpen_timers()
    data = torch.ones(2 * MICROBATCHES, FEATURES)
    micro = data[:2]
    steps = []
    predicted = {}
    for name, schedule in schedules(dist.get_world_size()).items():
        share = scale * (2 if name == "1F1B" else 1)
        own = [stage for stage, place in enumerate(schedule.placement) if place == dist.get_rank()]
        chunks = {stage: Sleeper(*(cost * share for cost in COSTS_MS)) for stage in own}
        # What is predicted is what a user would predict: from costs that were measured before.
        n_stages = len(schedule.placement)
        costs = measure_costs(chunks, n_stages, lambda stage: micro, squared, micro)
        predicted[name] = check_schedule(schedule, replace(costs, max_mem=math.inf)).makespan
        runtime = PipelineRuntime(schedule, chunks, squared)

        def ms(runtime: PipelineRuntime = runtime) -> float:
            dist.barrier()
            begin = time.perf_counter()
            runtime.train(data, target=data)
            dist.barrier()
            return (time.perf_counter() - begin) * 1e3

        ms()  # headers go with the first step
        steps.append(ms)
    return {
        name: (predicted[name], times)
        for name, times in zip(predicted, interleaved(rounds, *steps), strict=True)
    }


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
