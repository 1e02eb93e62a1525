"""The click model and HSTU on an accelerator: the same bits under every plan and after a stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.plans.torchrec.hstu_schedule import hstu_plan, hstu_schedule
from swpipe.profiler import TaskProfiler
from swpipe.tasks.torchrec import PerToken, SparseDistTasks, TaskOptions, TrainStep
from swpipe.tasks.torchrec.hstu import hstu_groups
from tests import backend
from tests.device.accelerator.training import on_host, same
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.support.click_example import HAS_POLARS, example
from tests.tasks.torchrec.hstu.ranking import SMALL, hstu_model

CLICK_STEPS, HSTU_STEPS = 6, 6
DEVICES = [f"{DEVICE.type}:{index}" for index in range(torch.accelerator.device_count())]


@dataclass
class Workload:
    """Tasks, batches, plans by name (None: serial), and the trained state."""

    tasks: list[PipelineTask]
    batches: list[Any]
    plan: Callable[[str | None], PipelinePlan]
    state: Callable[[], list[Tensor]]


def click_batches(folder: Path) -> list[Any]:
    """Return the batches of 50 rows, 8 in each."""
    log = example("click_log")
    batches: list[Any] = log.batches_of(log.generate(folder / "small.tsv", 50), 8)
    return batches


def clicks(device: str, folder: Path) -> Workload:
    """Return the click model of the examples."""
    module = example("click_job")
    job = module.ClickJob(device=device, buckets=64)
    return Workload(
        job.tasks(),
        click_batches(folder)[:CLICK_STEPS],
        lambda name: module.PLANS[name or "serial"](),
        lambda: [*job.model.parameters()],
    )


def hstu(device: str, folder: Path) -> Workload:
    """Return an HSTU model whose plans are presets of threads."""
    model = hstu_model.HSTURanking(SMALL).to(device)
    step = TrainStep([torch.optim.Adagrad(model.parameters(), lr=0.05)], per_token=PerToken())
    options = TaskOptions(forward="own", grouped=hstu_groups(True, split=False))
    made = SparseDistTasks(model, step, options, device=device).tasks()
    schedule = hstu_schedule(prefetch=True, prefetch_depth=1, shuffled=False)
    histories = hstu_model.generate_ratings(4 * HSTU_STEPS, SMALL.items, SMALL.longest, seed=0)
    batches = [hstu_model.SequenceBatch.of(histories[k::HSTU_STEPS]) for k in range(HSTU_STEPS)]
    return Workload(
        [*made],
        batches if SIMULATED else [batch.pin_memory() for batch in batches],
        lambda name: PipelinePlan.serial(made) if name is None else hstu_plan(schedule, name),
        lambda: [*model.parameters()],
    )


def lagging(task: PipelineTask) -> PipelineTask:
    """Return the task with some device work before and after it."""

    def fn(ctx: object) -> None:
        spin(0.3)
        task.fn(ctx)  # type: ignore[arg-type]
        spin(0.2)

    return replace(task, fn=fn)


def trained(
    make: Callable[[str, Path], Workload], name: str | None, device: str, folder: Path
) -> list[Tensor]:
    """Train; return the losses and the final state, on the host."""
    work = make(device, folder)
    with SWPipeline(work.plan(name), [*map(lagging, work.tasks)], device=device) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(work.batches)]
        pipe.device.synchronize()
    state = [*losses, *work.state()]
    assert {tensor.device for tensor in state} == {torch.device(device)}
    return on_host(state)


@pytest.mark.parametrize(
    ("make", "name", "streams"),
    [
        (clicks, "pipelined", 1),
        (clicks, "pipelined", 2),
        (hstu, "default", 2),
        (hstu, "io_data_dist_prefetch_compute", backend.POOL),
    ],
)
def test_a_plan_trains_to_the_serial_plans_bits(
    make: Any, name: str, streams: int, tmp_path: Path
) -> None:
    """This holds for late and for few streams; the caller's device is always the first one."""
    if make is clicks and not HAS_POLARS:
        pytest.skip("needs polars")
    serial = trained(make, None, DEVICES[-1], tmp_path)
    bad = {"late_streams": 200.0, "streams": streams, "poison": True}
    with backend.misbehaving(**bad) if SIMULATED else nullcontext():  # type: ignore[arg-type]
        assert same(trained(make, name, DEVICES[-1], tmp_path), serial)
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.skipif(not HAS_POLARS, reason="needs polars")
def test_profiles_and_recordings_train_nothing(tmp_path: Path) -> None:
    """After a recording and a profile the job trains as if there had been neither."""
    work = clicks(DEVICES[-1], tmp_path)
    plan = work.plan("pipelined")
    recording = record(work.tasks, work.batches[0], device=DEVICES[-1])
    assert recording.compare(plan).missing == ()
    with SWPipeline(plan, work.tasks, device=DEVICES[-1]) as pipe:
        TaskProfiler(pipe).profile(work.batches[0], 1, 1, 2, pipelined=True)
        losses = [ctx.loss.detach() for ctx in pipe.iterate(work.batches)]
    expected = trained(clicks, None, DEVICES[-1], tmp_path)
    assert same(on_host(losses), expected[: len(losses)])
