"""HSTU on an accelerator: the same bits under every preset of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")
pytest.importorskip("polars")

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.torchrec.hstu_schedule import HSTU_THREAD_MAPS, PLANS
from swpipe.tasks.torchrec.hstu import RankingConfig
from swpipe.tasks.torchrec.hstu.hstu_job import HSTUConfig, HSTUJob
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin

SMALL = RankingConfig(items=40, width=8, heads=2, layers=1, longest=6)
CONFIG = HSTUConfig(sequences=4, device=f"{DEVICE.type}:0", model=SMALL)
STEPS = 8


def lagging(task: PipelineTask) -> PipelineTask:
    """The task, with some device work before and after."""

    def fn(ctx: object) -> None:
        spin(0.3)
        task.fn(ctx)  # type: ignore[arg-type]
        spin(0.2)

    return replace(task, fn=fn)


def trained(plan: PipelinePlan) -> list[Tensor]:
    """Losses, the parameters after them, and the metric; on the host."""
    job = HSTUJob(CONFIG)
    tasks = [lagging(task) for task in job.tasks()]
    with SWPipeline(plan, tasks, device=CONFIG.device) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches(STEPS))]
        pipe.device.synchronize()
    state = [*losses, *job.model.parameters(), job.auc.counts]
    assert {tensor.device for tensor in state} == {torch.device(CONFIG.device)}
    return [tensor.detach().cpu() for tensor in state]


@pytest.mark.parametrize("preset", HSTU_THREAD_MAPS)
def test_every_preset_trains_to_the_serial_plans_bits(preset: str) -> None:
    """Each task's device work takes a while."""
    one, other = trained(PLANS[preset]()), trained(PLANS["serial"]())
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.skipif(not SIMULATED, reason="needs a device that can misbehave")
@pytest.mark.parametrize("preset", ["default", "by_stream"])
def test_late_streams_change_nothing(preset: str) -> None:
    """Nor does freed memory that is overwritten at once."""
    serial = trained(PLANS["serial"]())
    with backend.misbehaving(late_streams=200.0, streams=2, poison=True):
        assert all(map(torch.equal, trained(PLANS[preset]()), serial))
