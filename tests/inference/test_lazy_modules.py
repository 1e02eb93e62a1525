"""Lazy modules, whose parameters have no memory before the first forward."""

from __future__ import annotations

import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.inference import record

BATCHES = [torch.rand(3, 4, generator=torch.Generator().manual_seed(n)) for n in range(5)]


class Job:
    """A loop whose model learns from its first batch how wide its input is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2))

    def decode(self, ctx: IterContext) -> None:
        """To another width."""
        ctx.x = torch.cat([ctx.batch, ctx.batch.flip(0) + torch.arange(4.0)], 1)

    def forward(self, ctx: IterContext) -> None:
        """Makes the parameters on the first iteration."""
        ctx.y = self.model(ctx.x).sum()
        ctx.y.backward()

    def tasks(self, *, pure: bool = True) -> list[PipelineTask]:
        """In serial order."""
        decode = PipelineTask("decode", self.decode, pure=pure)
        return [decode, PipelineTask("forward", self.forward)]


PLAN = PipelinePlan(
    {"decode": TaskSchedule(thread_group="io"), "forward": TaskSchedule(1)},
    deps=[("forward", "decode")],
)


def numbers(tasks: list[PipelineTask], check: bool | None) -> list[float]:
    """The losses of a run under the plan, or of a serial one where nothing is checked."""
    plan = PipelinePlan.serial(tasks) if check is False else PLAN
    with SWPipeline(plan, tasks, device="cpu", check_effects=check) as pipe:
        return [ctx.y.item() for ctx in pipe.iterate(BATCHES)]


def test_a_watched_run_gives_the_serial_numbers() -> None:
    """Where one task is watched, and where both are."""
    serial = numbers(Job().tasks(), False)
    assert numbers(Job().tasks(), None) == serial
    assert numbers(Job().tasks(pure=False), True) == serial


def test_a_recording_finds_its_order() -> None:
    """The parameters that it has made stay, and are those that the first batch would make."""
    tasks = Job().tasks()
    recording = record(tasks, BATCHES[0], device="cpu")
    assert ("forward", "decode") in recording.plan().deps
    assert numbers(tasks, None) == numbers(Job().tasks(), False)
