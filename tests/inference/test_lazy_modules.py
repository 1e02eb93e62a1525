"""Lazy modules, whose parameters have no memory before the first forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.errors import PlanError
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


def numbers(plan: PipelinePlan, tasks: list[PipelineTask], check: bool | None) -> list[float]:
    """The losses."""
    with SWPipeline(plan, tasks, device="cpu", check_effects=check) as pipe:
        return [ctx.y.item() for ctx in pipe.iterate(BATCHES)]


def serial() -> list[float]:
    """The numbers of a serial run."""
    tasks = Job().tasks()
    return numbers(PipelinePlan.serial(tasks), tasks, False)


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("check", [None, True])
def test_a_watched_run_gives_the_serial_numbers(check: bool | None, pure: bool) -> None:
    """Where one task is watched, and where both are."""
    assert numbers(PLAN, Job().tasks(pure=pure), check) == serial()


def test_a_recording_finds_its_order() -> None:
    """The parameters that it has made stay, and are those that the first batch would make."""
    job = Job()
    tasks = job.tasks()
    recording = record(tasks, BATCHES[0], device="cpu")
    assert ("forward", "decode") in recording.plan().deps
    assert numbers(PLAN, tasks, None) == serial()


def test_a_pure_task_may_not_draw_its_first_parameters() -> None:
    """They would depend on who draws before it, as in each task that draws."""
    lazy = nn.LazyLinear(2)
    lazy.weight.requires_grad = lazy.bias.requires_grad = False

    def features(ctx: IterContext) -> None:
        ctx.y = lazy(ctx.batch)

    tasks = [PipelineTask("features", features, pure=True), PipelineTask("use", lambda ctx: None)]
    plan = PipelinePlan(
        {"features": TaskSchedule(thread_group="io"), "use": TaskSchedule(1)},
        deps=[("use", "features")],
    )
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        with pytest.raises(PlanError, match="draws from torch's default generators"):
            pipe.run(BATCHES)
