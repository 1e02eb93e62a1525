"""The click job on an accelerator: the same bits under every plan, in pieces, and after stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")
pytest.importorskip("polars")

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.plans.clicks import PLANS
from swpipe.profiler import TaskProfiler
from swpipe.tasks.clicks import ClickConfig, ClickJob, ModelConfig
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.tasks.clicks.rows import write_log

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))
STEPS = 12


@pytest.fixture(params=range(torch.accelerator.device_count()))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ClickConfig:
    """A small model on 50 rows, in batches of 8, on each device in turn."""
    device = f"{DEVICE.type}:{request.param}"
    log = write_log(tmp_path / "small.tsv", 50)
    return ClickConfig([log], batch_size=8, model=SMALL, device=device)


def lagging(job: ClickJob) -> list[PipelineTask]:
    """The job's tasks, each with some device work before and after."""

    def slow(task: PipelineTask) -> PipelineTask:
        def fn(ctx: object) -> None:
            spin(0.3)
            task.fn(ctx)  # type: ignore[arg-type]
            spin(0.2)

        return replace(task, fn=fn)

    return [slow(task) for task in job.tasks()]


def trained(config: ClickConfig, plan: PipelinePlan) -> list[Tensor]:
    """Losses of 12 steps, the parameters after them, and the metric; on the host."""
    job = ClickJob(config)
    with SWPipeline(plan, lagging(job), device=config.device) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches(STEPS))]
        pipe.device.synchronize()
    state = [*losses, *job.model.parameters(), job.auc.counts]
    assert {tensor.device for tensor in state} == {torch.device(config.device)}
    job.close()
    return [tensor.detach().cpu() for tensor in state]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all bits are."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", [name for name in PLANS if name != "serial"])
def test_every_plan_trains_to_the_serial_plans_bits(config: ClickConfig, name: str) -> None:
    """The caller's device is the first one, whichever the job is on."""
    assert equal(trained(config, PLANS[name]()), trained(config, PLANS["serial"]()))
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.skipif(not SIMULATED, reason="needs a device that can misbehave")
@pytest.mark.parametrize("streams", [1, 2])
def test_late_streams_change_nothing(config: ClickConfig, streams: int) -> None:
    """Nor do few of them, nor freed memory that is overwritten at once."""
    serial = trained(config, PLANS["serial"]())
    with backend.misbehaving(late_streams=200.0, streams=streams, poison=True):
        assert equal(trained(config, PLANS["pipelined"]()), serial)


def test_profiles_and_recordings_train_nothing(config: ClickConfig) -> None:
    """After a recording and a profile the job trains as if there had been neither."""
    plan = PLANS["pipelined"]()
    job = ClickJob(config)
    recording = record(job.tasks(), next(job.batches()), device=config.device)
    assert recording.compare(plan).missing == ()
    with SWPipeline(plan, job.tasks(), device=config.device) as pipe:
        batch = next(job.batches())
        TaskProfiler(pipe).profile(batch, 1, 2, 2, pipelined=True)
        losses = [ctx.loss.detach().cpu() for ctx in pipe.iterate(job.batches(STEPS))]
    assert equal(losses, trained(config, PLANS["serial"]())[: len(losses)])
    job.close()
