"""FSDP stages whose collectives take 5 ms: swpipe's runtime compared with torch's.

Two pipelines of two ranks run torch's interleaved 1F1B with six stages on each rank. A stage is
sharded over the two ranks that have it. It stands for a layer of Llama 3 8B, 218 million
parameters in bfloat16, with 4,096 tokens per microbatch, on GPUs that compute 450 TFLOP/s and are
linked by 400 Gb/s: F takes 4.3 ms, I 4.7, W 4.0, and a collective 4.4.

    torch's runtime    gathers the next three stages, and waits for each reduction
    torch's cells      the same schedule on swpipe's runtime, whose passes overlap reductions
    ours               that, with cells of ``place_collectives`` with room for three stages

Each of them holds at most three unsharded stages, and the input of one reduction. Passes sleep, as
in ``bench.pipeline_parallel``, and so does a wait for the emulated link, which runs one
collective at a time: 2 cores suffice for 4 ranks. All times are stretched by four, link and passes
alike: the Python of torch, FSDP and the runtime, 1 to 2 ms per pass on these cores, would be the
third part of a step otherwise, where a GPU computes while the host runs ahead.

Two rows without a bar show the results without this: unscaled times, and stages that compute,
where the ranks share the cores and a pass that overlaps a collective saves little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
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
    Action,
    PipelineCosts,
    PipelineSchedule,
    check_schedule,
    place_collectives,
)

RANKS, STAGES_OF_A_RANK, UNSHARDED = 2, 6, 3
N_STAGES = RANKS * STAGES_OF_A_RANK
COSTS_MS = (4.0, 5.0, 4.0)
"""The costs F, I and W of a stage."""

LATENCY_MS = 5.0

STRETCH = 4.0
"""The factor of all times."""

BARS = {2: 0.95, 4: None, 8: None}
"""The bars by number of microbatches: each stage is reduced once for any number of them."""

WIDTH = 512
"""Features of the stages that compute."""

OURS, CELLS, TORCHS = "ours", "torch's cells", "torch's runtime"


def _is_sent(cell: object) -> bool:
    return "SEND_" in str(cell) or "RECV_" in str(cell)


class Contest:
    """The contenders on this rank, each with stages of its own that are equal at first.

    Args:
        stage_of: Makes the module of a stage.
        n_micro: The number of microbatches.
        data: The inputs, and the targets, of a batch.
    """

    def __init__(self, stage_of: Callable[[int], nn.Module], n_micro: int, data: Tensor) -> None:
        mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("pipeline", "shards"))
        rank = mesh["pipeline"].get_local_rank()
        self._group = mesh["pipeline"].get_group()
        self._n_micro = n_micro
        self._data = data
        self._modules: dict[str, dict[int, nn.Module]] = {
            name: {
                stage: fully_shard(stage_of(stage), mesh=mesh["shards"])
                for stage in range(rank, N_STAGES, RANKS)
            }
            for name in (OURS, CELLS, TORCHS)
        }
        device = torch.device("cpu")
        stages = [
            PipelineStage(module, stage, N_STAGES, device, group=self._group)
            for stage, module in self._modules[TORCHS].items()
        ]
        theirs: Any = ScheduleInterleaved1F1B(stages, n_micro, loss_fn=squared)
        # The runtime places sends and receives itself, so that a schedule has none.
        rows = [
            [cell for cell in theirs.pipeline_order_with_comms[number] if not _is_sent(cell)]
            for number in range(RANKS)
        ]
        cells = PipelineSchedule.from_csv("\n".join(",".join(map(str, row)) for row in rows))
        self.schedule = place_collectives(cells, max_unsharded=UNSHARDED)
        inputs = (data,) if rank == 0 else ()
        target = data if rank == RANKS - 1 else None
        losses: list[Tensor] | None = None if target is None else []
        self._steps: dict[str, Callable[[], object]] = {
            OURS: self._on_our_runtime(self.schedule, OURS),
            CELLS: self._on_our_runtime(cells, CELLS),
            TORCHS: lambda: theirs.step(
                *inputs, target=target, losses=losses, return_outputs=False
            ),
        }

    def _on_our_runtime(self, schedule: PipelineSchedule, name: str) -> Callable[[], object]:
        from swpipe.tasks.pipeline_parallel import PipelineRuntime

        runtime = PipelineRuntime(schedule, self._modules[name], squared, group=self._group)
        return lambda: runtime.train(self._data, target=self._data)

    def _ms(self, step: Callable[[], object]) -> float:
        for modules in self._modules.values():
            for module in modules.values():
                module.zero_grad()
        dist.barrier()
        begin_s = time.perf_counter()
        step()
        dist.barrier()
        return (time.perf_counter() - begin_s) * 1e3

    def measured(self, rounds: int) -> dict[str, list[float]]:
        """Return the times of each contender's steps, in ms.

        Raises:
            ValueError: The contenders found different gradients of the shards.
        """
        grads: list[list[Tensor]] = []
        for name, step in self._steps.items():
            self._ms(step)  # headers, and torch's additional run, come with the first step
            self._ms(step)
            modules = self._modules[name].values()
            grads.append([_shard(p.grad) for module in modules for p in module.parameters()])
        if not all(all(map(torch.equal, grads[0], other)) for other in grads[1:]):
            raise ValueError("the contenders found different gradients of the shards")
        measures = [lambda step=step: self._ms(step) for step in self._steps.values()]
        return dict(zip(self._steps, interleaved(rounds, *measures), strict=True))

    def costs(self, costs_ms: tuple[float, ...], latency_ms: float) -> PipelineCosts:
        """Return the costs of the stages, with the time of the runtime and of FSDP, in ms.

        The latter is measured with microbatches in sequence, where no two passes overlap.
        """
        from swpipe.tasks.pipeline_parallel import measure_hop

        micro = self._data.chunk(self._n_micro)[0]
        hop = measure_hop(micro, group=self._group)
        costs = PipelineCosts(
            *costs_ms, hop=hop, unshard=latency_ms, reduce=latency_ms, max_mem=math.inf
        )
        one_by_one = place_collectives(_one_by_one(self._n_micro), max_unsharded=UNSHARDED)
        step = self._on_our_runtime(one_by_one, OURS)
        self._ms(step)
        measured = statistics.median(self._ms(step) for _ in range(5))
        rest = max(0.0, measured - check_schedule(one_by_one, costs).makespan)
        own = rest / (2 * N_STAGES * self._n_micro)
        forward, backward, _ = costs_ms
        return replace(costs, forward=forward + own, backward=backward + own)


def _one_by_one(n_micro: int) -> PipelineSchedule:
    """Return the schedule that runs the microbatches in sequence."""
    rows = []
    for rank in range(RANKS):
        own = range(rank, N_STAGES, RANKS)
        forward = [(stage, "F") for stage in own]
        backward = [(stage, "B") for stage in reversed(own)]
        passes = forward + backward
        rows.append(
            tuple(Action(s, op, micro) for micro in range(n_micro) for s, op in passes)  # type: ignore[arg-type]
        )
    return PipelineSchedule(tuple(rows), n_micro)


def _shard(grad: Any) -> Tensor:
    """Return a copy of this rank's shard of a gradient."""
    shard: Tensor = grad.to_local().clone()
    return shard


def on_rank(n_micro: int, rounds: int, scale: float) -> tuple[dict[str, list[float]], float]:
    """Return the times by contender with passes that sleep, and the prediction of ours, in ms."""
    sharpen_timers()
    costs_ms = tuple(cost * scale for cost in COSTS_MS)
    latency_ms = LATENCY_MS * scale
    contest = Contest(lambda _: Sleeper(*costs_ms), n_micro, torch.ones(2 * n_micro, FEATURES))
    with EmulatedLink(latency_ms, in_turn=True):
        times = contest.measured(rounds)
        costs = contest.costs(costs_ms, latency_ms)
    return times, check_schedule(contest.schedule, costs).makespan


def computing_on_rank(n_micro: int, rounds: int, width: int) -> dict[str, list[float]]:
    """Return the times by contender with stages that compute, in ms."""

    def stage_of(stage: int) -> nn.Module:
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    torch.manual_seed(0)
    contest = Contest(stage_of, n_micro, torch.randn(32 * n_micro, width))
    with EmulatedLink(LATENCY_MS, in_turn=True):
        return contest.measured(rounds)


def _rows(ranks: Any, n_micro: int, rounds: int, scale: float, bar: float | None) -> list[Row]:
    """Return the rows for one number of microbatches."""
    times, predicted_ms = ranks.run(on_rank, n_micro, rounds, scale)[0]
    what = f"{STAGES_OF_A_RANK} FSDP stages a rank, {n_micro} microbatches, {scale:g} x 5 ms"
    ours, cells, torchs = times.values()
    return [
        compared(what, ours, torchs, "ms", TORCHS, bar, digits=1),
        compared(f"{what}, {CELLS}", cells, torchs, "ms", TORCHS, digits=1),
        Row(
            f"{what}, predicted",
            f"{predicted_ms:.1f} ms",
            f"measured {Spread.of(ours).text(1)} ms",
            off_by([predicted_ms] * rounds, ours),
        ),
    ]


def rows(rounds: int = 9) -> list[Row]:
    """Return ours over torch's with the bar, its parts, predicted over measured, and computed."""
    from tests.support.ranks import Ranks

    try:
        import swpipe.tasks.pipeline_parallel.torch_pipelining  # noqa: F401
    except ImportError as error:  # another torch
        return [Row("sharded stages", f"skipped: {error}")]
    table = []
    with Ranks(2 * RANKS, deadline_s=300.0) as ranks:
        for n_micro, bar in BARS.items():
            count = max(3, 2 * rounds // n_micro)
            table += _rows(ranks, n_micro, count, STRETCH, bar)
        table += _rows(ranks, 2, 2 * rounds, 1.0, None)
        ours, _, torchs = ranks.run(computing_on_rank, 2, rounds, WIDTH)[0].values()
    what = f"{STAGES_OF_A_RANK} FSDP stages a rank that compute, 2 microbatches"
    return [*table, compared(what, ours, torchs, "ms", TORCHS, digits=1)]
