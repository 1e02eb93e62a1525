"""A planned zero-bubble schedule compared with torch's 1F1B and ZBV, on four ranks.

The passes of a stage sleep: F 20 ms, I (the gradient of its input) 30 ms, W (of its weights) 15 ms,
twice as long in 1F1B, which has one stage per rank where the others have two. The contenders are
torch's own classes. A step lasts from one barrier to the next. The table also shows the checker's
prediction, with the measured hop, and with stage 0 as torch's runtime treats it: nothing in I, and
its whole backward pass in W.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from bench.measure import Row, Spread, compared, interleaved, off_by, sharpen_timers
from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
)

RANKS, MICROBATCHES = 4, 8
COSTS_MS = (20.0, 30.0, 15.0)
"""The costs F, I and W of a stage; each rank has two."""

FEATURES = 8
LEAST_MS = 1e-3

OURS, F1B1, ZBV = "ours", "Schedule1F1B", "ScheduleZBVZeroBubble"
BARS = {F1B1: 0.9, ZBV: 1.05}


class Activation(torch.autograd.Function):
    """A function of the activation: sleeps in F, and where its input's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Sleeper) -> Tensor:
        ctx.stage = stage
        stage.sleep("F")
        return x.clone()  # the runtime cannot detach a view

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.stage.sleep("I")
        return grads[0], None


class Weight(torch.autograd.Function):
    """A function of the weight: sleeps where the weight's gradient is computed.

    A single function of both inputs would compute both gradients in I, and again in W.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: Sleeper) -> Tensor:
        ctx.stage = stage
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.stage.sleep("W")
        return grads[0], None


class Sleeper(nn.Module):
    """A stage whose passes take a set time.

    Attributes:
        slept: The op of each pass, and its begin and end in nanoseconds.
    """

    def __init__(self, forward_ms: float, backward_ms: float, weight_ms: float) -> None:
        super().__init__()
        self.times_ms = {"F": forward_ms, "I": backward_ms, "W": weight_ms}
        self.slept: list[tuple[str, int, int]] = []
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def sleep(self, op: str) -> None:
        begin_ns = time.perf_counter_ns()
        time.sleep(self.times_ms[op] / 1e3)
        self.slept.append((op, begin_ns, time.perf_counter_ns()))

    def forward(self, x: Tensor) -> Tensor:
        weighted = x * Weight.apply(self.weight, self)
        out: Tensor = Activation.apply(weighted, self)
        return out


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def costs_of(n_stages: int, hop_ms: float, scale: float, share: float = 1.0) -> PipelineCosts:
    """Return the costs of the stages in ms; stage 0 does its whole backward pass in W."""
    forward, backward, weight = (cost * share * scale for cost in COSTS_MS)
    return PipelineCosts(
        forward=[forward] * n_stages,
        backward=[LEAST_MS, *[backward] * (n_stages - 1)],
        weight=[backward + weight, *[weight] * (n_stages - 1)],
        hop=hop_ms,
    )


class Contest:
    """The contenders on this rank, and the predictions of their steps."""

    def __init__(self, scale: float, effort: float) -> None:
        from swpipe.tasks.pipeline_parallel import PipelineRuntime, measure_hop

        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.data = torch.ones(2 * MICROBATCHES, FEATURES)
        hop_ms = measure_hop(self.data[:2])
        costs = costs_of(2 * size, hop_ms, scale)
        single = costs_of(size, hop_ms, scale, share=2.0)
        planned = [plan_v_schedule(size, MICROBATCHES, costs, effort=effort).schedule]
        dist.broadcast_object_list(planned)  # each rank measures another hop
        schedules = {
            OURS: (planned[0], costs),
            F1B1: (torch_schedule("1f1b", size, MICROBATCHES), single),
            ZBV: (torch_schedule("zbv", size, MICROBATCHES), costs),
        }
        self.predicted_ms = {
            name: check_schedule(schedule, replace(its, max_mem=float("inf"))).makespan
            for name, (schedule, its) in schedules.items()
        }
        self.hop_ms = hop_ms
        self._runtime = PipelineRuntime(planned[0], self._stages(planned[0], scale), squared)
        self.steps: dict[str, Callable[[], object]] = {
            OURS: lambda: self._runtime.train(self.data, target=self.data),
            F1B1: self._of_torch(schedules[F1B1][0], 2 * scale),
            ZBV: self._of_torch(schedules[ZBV][0], scale),
        }

    def _stages(self, schedule: PipelineSchedule, scale: float) -> dict[int, nn.Module]:
        own = [stage for stage, place in enumerate(schedule.placement) if place == self.rank]
        return {stage: Sleeper(*(cost * scale for cost in COSTS_MS)) for stage in own}

    def _of_torch(self, schedule: PipelineSchedule, scale: float) -> Callable[[], object]:
        """Return the step of torch's own class on the stages of the schedule."""
        last, device = schedule.n_stages - 1, torch.device("cpu")
        stages = [
            PipelineStage(module, stage, schedule.n_stages, device)
            for stage, module in self._stages(schedule, scale).items()
        ]
        made: Any
        if len(stages) == 1:
            made = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=squared)
        else:
            made = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=squared)
        inputs = (self.data,) if schedule.placement[0] == self.rank else ()
        target = self.data if schedule.placement[last] == self.rank else None
        losses: list[Tensor] | None = None if target is None else []
        return lambda: made.step(*inputs, target=target, losses=losses, return_outputs=False)

    def ms(self, name: str) -> float:
        """Return the time of a step from barrier to barrier, in ms."""
        dist.barrier()
        begin = time.perf_counter()
        self.steps[name]()
        dist.barrier()
        return (time.perf_counter() - begin) * 1e3


def on_rank(rounds: int, scale: float, effort: float) -> tuple[Any, ...]:
    """Return the times and predictions by contender, and the hop, in ms, of this rank."""
    sharpen_timers()
    contest = Contest(scale, effort)
    for name in contest.steps:
        contest.ms(name)  # shapes are found
    measures = [lambda name=name: contest.ms(name) for name in contest.steps]
    found = dict(zip(contest.steps, interleaved(rounds, *measures), strict=True))
    return found, contest.predicted_ms, contest.hop_ms


def rows(rounds: int = 7, scale: float = 1.0, effort: float = 1.0) -> list[Row]:
    """Return the planned schedule over each of torch's, and predicted over measured."""
    from tests.support.ranks import Ranks

    try:
        import swpipe.tasks.pipeline_parallel.torch_pipelining  # noqa: F401
    except ImportError as error:  # another torch
        return [Row("planned schedule", f"skipped: {error}")]
    with Ranks(RANKS, deadline_s=200.0) as ranks:
        measured, predicted, hop_ms = ranks.run(on_rank, rounds, scale, effort)[0]
    what = f"step of {MICROBATCHES} microbatches on {RANKS} ranks, planned schedule"
    found = [
        compared(what, measured[OURS], measured[name], "ms", name, bar, digits=1)
        for name, bar in BARS.items()
    ]
    for name, times in measured.items():
        found.append(
            Row(
                f"predicted of it, {name} (hop {hop_ms:.2f} ms)",
                f"{predicted[name]:.1f} ms",
                f"measured {Spread.of(times).text(1)} ms",
                off_by([predicted[name]] * len(times), times),
            )
        )
    return found
