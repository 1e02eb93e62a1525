"""FSDP stages with collectives as swpipe runs them, and as torch does, where each takes 5 ms.

Two pipelines of two ranks run torch's interleaved 1F1B with six stages on each rank; a stage is
sharded over the two ranks that have it. Torch's class places the collectives itself, for three
unsharded stages. ``place_collectives`` has room for as many here. Passes sleep, as in
``bench.pipeline_parallel``; the link is emulated, and runs one collective at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from bench.emulated_link import EmulatedLink
from bench.measure import Row, Spread, compared, interleaved, off_by, sharpen_timers
from bench.pipeline_parallel import FEATURES, Sleeper, squared
from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    check_schedule,
    place_collectives,
)

RANKS, MICROBATCHES, STAGES_OF_A_RANK, UNSHARDED = 2, 2, 6, 3
N_STAGES = RANKS * STAGES_OF_A_RANK
COSTS_MS = (3.0, 4.0, 2.0)
"""F, I and W of a stage."""

LATENCY_MS, BAR = 5.0, 0.95


@dataclass
class Measured:
    """What was found on one rank, in milliseconds per step.

    Attributes:
        ours_ms: With our placement on our runtime, a figure per round.
        torchs_ms: With torch's class.
        predicted_ms: Of ours.
        same: Whether both found the same gradients, bit for bit.
    """

    ours_ms: list[float]
    torchs_ms: list[float]
    predicted_ms: float
    same: bool


def on_rank(rounds: int, scale: float) -> Measured:
    """Run both in turn."""
    from swpipe.tasks.pipeline_parallel import PipelineRuntime, measure_hop

    sharpen_timers()
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("pipeline", "shards"))
    pipeline = mesh["pipeline"].get_group()
    rank = mesh["pipeline"].get_local_rank()
    costs_ms = [cost * scale for cost in COSTS_MS]
    modules: list[dict[int, nn.Module]] = [
        {
            stage: fully_shard(Sleeper(*costs_ms), mesh=mesh["shards"])
            for stage in range(rank, N_STAGES, RANKS)
        }
        for _ in range(2)
    ]
    device = torch.device("cpu")
    stages = [
        PipelineStage(module, stage, N_STAGES, device, group=pipeline)
        for stage, module in modules[1].items()
    ]
    theirs: Any = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=squared)
    rows = (filter(None, theirs.pipeline_order[number]) for number in range(RANKS))
    order = PipelineSchedule.from_csv("\n".join(",".join(map(str, row)) for row in rows))
    schedule = place_collectives(order, max_unsharded=UNSHARDED)
    ours = PipelineRuntime(schedule, modules[0], squared, group=pipeline)
    data = torch.ones(2 * MICROBATCHES, FEATURES)
    inputs = (data,) if rank == 0 else ()
    target = data if rank == RANKS - 1 else None
    losses: list[Tensor] | None = None if target is None else []

    def ms(step: Callable[[], object]) -> float:
        for module in (*modules[0].values(), *modules[1].values()):
            module.zero_grad()
        dist.barrier()
        begin_s = time.perf_counter()
        step()
        dist.barrier()
        return (time.perf_counter() - begin_s) * 1e3

    steps: list[Callable[[], object]] = [
        lambda: ours.train(data, target=data),
        lambda: theirs.step(*inputs, target=target, losses=losses, return_outputs=False),
    ]
    grads: list[list[Tensor]] = []
    with EmulatedLink(LATENCY_MS * scale, in_turn=True):
        for step, held in zip(steps, modules, strict=True):
            ms(step)  # shapes are found
            ms(step)
            grads.append([_shard(one.weight.grad) for one in held.values()])
        ours_ms, torchs_ms = interleaved(rounds, *(lambda step=step: ms(step) for step in steps))
    costs = PipelineCosts(
        *costs_ms,
        hop=measure_hop(data[:2], group=pipeline),
        unshard=LATENCY_MS * scale,
        reduce=LATENCY_MS * scale,
        max_mem=math.inf,
    )
    same = all(map(torch.equal, *grads))
    return Measured(ours_ms, torchs_ms, check_schedule(schedule, costs).makespan, same)


def _shard(grad: Any) -> Tensor:
    """Return a copy of this rank's shard of a gradient."""
    shard: Tensor = grad.to_local().clone()
    return shard


def rows(rounds: int = 9, scale: float = 1.0) -> list[Row]:
    """Return ours over torch's with the bar, and what was predicted of ours, over measured."""
    from tests.support.ranks import Ranks

    try:
        import swpipe.tasks.pipeline_parallel.torch_pipelining  # noqa: F401
    except ImportError as error:  # another torch
        return [Row("sharded stages", f"skipped: {error}")]
    with Ranks(2 * RANKS, deadline_s=200.0) as ranks:
        measured: list[Measured] = ranks.run(on_rank, rounds, scale)
    if not all(one.same for one in measured):
        raise ValueError("the runtimes found different gradients of the shards")
    first = measured[0]
    what = f"interleaved 1F1B, {STAGES_OF_A_RANK} FSDP stages a rank, L = {LATENCY_MS:g} ms"
    beside = "torch's placement"
    times = first.ours_ms
    predicted_ms = [first.predicted_ms] * len(times)
    return [
        compared(what, times, first.torchs_ms, "ms", beside, BAR, digits=1),
        Row(
            f"{what}: predicted",
            f"{first.predicted_ms:.1f} ms",
            f"measured {Spread.of(times).text(1)} ms",
            off_by(predicted_ms, times),
        ),
    ]
