"""HSTU on an accelerator: the same bits under every preset of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.torchrec.hstu_schedule import HSTU_THREAD_MAPS, hstu_plan, hstu_schedule
from swpipe.tasks.torchrec import PerToken, SparseDistTasks, TaskOptions, TrainStep
from swpipe.tasks.torchrec.hstu import hstu_groups
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.tasks.torchrec.hstu.ranking import SMALL, hstu_model

HOME = f"{DEVICE.type}:0"
STEPS = 8


def lagging(task: PipelineTask) -> PipelineTask:
    """The task, with some device work before and after."""

    def fn(ctx: object) -> None:
        spin(0.3)
        task.fn(ctx)  # type: ignore[arg-type]
        spin(0.2)

    return replace(task, fn=fn)


def trained(preset: str | None) -> list[Tensor]:
    """Losses, and the parameters after them, on the host; None is the serial plan."""
    model = hstu_model.HSTURanking(SMALL).to(HOME)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    step = TrainStep([optimizer], per_token=PerToken())
    options = TaskOptions(forward="own", grouped=hstu_groups(True))
    made = SparseDistTasks(model, step, options, device=HOME).tasks()
    schedule = hstu_schedule(prefetch=True, prefetch_depth=1, shuffled=False)
    plan = PipelinePlan.serial(made) if preset is None else hstu_plan(schedule, preset)
    histories = hstu_model.generate_ratings(4 * STEPS, SMALL.items, SMALL.longest, seed=0)
    batches = [hstu_model.SequenceBatch.of(histories[k::STEPS]) for k in range(STEPS)]
    if not SIMULATED:
        batches = [batch.pin_memory() for batch in batches]
    with SWPipeline(plan, [lagging(task) for task in made], device=HOME) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(batches)]
        pipe.device.synchronize()
    state = [*losses, *model.parameters()]
    assert {tensor.device for tensor in state} == {torch.device(HOME)}
    return [tensor.detach().cpu() for tensor in state]


@pytest.mark.parametrize("preset", HSTU_THREAD_MAPS)
def test_every_preset_trains_to_the_serial_plans_bits(preset: str) -> None:
    """Each task's device work takes a while."""
    one, other = trained(preset), trained(None)
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.skipif(not SIMULATED, reason="needs a device that can misbehave")
@pytest.mark.parametrize("preset", ["default", "by_stream"])
def test_late_streams_change_nothing(preset: str) -> None:
    """Nor does freed memory that is overwritten at once."""
    serial = trained(None)
    with backend.misbehaving(late_streams=200.0, streams=2, poison=True):
        assert all(map(torch.equal, trained(preset), serial))
