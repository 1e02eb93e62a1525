"""State on an accelerator is saved after, and restored before, the work that changes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import Owner
from swpipe.device import AcceleratorDevice, resolve
from tests.device.accelerator.work import DEVICE, spin, warm_up

DEVICES = [f"{DEVICE.type}:{index}" for index in range(torch.accelerator.device_count())]
LATE_MS = 20.0


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn; the caller's current device is the first one."""
    warm_up()
    return str(request.param)


def later(device: str, change: Callable[[], Any]) -> None:
    """Submit ``change`` to a stream of its own, which is busy at first."""
    with torch.accelerator.device_index(torch.device(device).index or 0):
        stream = torch.Stream(device=device)
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        spin(LATE_MS)
        change()
        torch.accelerator.set_stream(before)


def saved_and_restored(device: str) -> tuple[float, float]:
    """A tensor is changed late, saved, changed late again, restored: what it is, then and now."""
    tensor = torch.zeros(64, device=device)
    torch.accelerator.synchronize(device)
    later(device, lambda: tensor.add_(1.0))
    snapshot = Snapshot([Owner("tensor", tensor)], resolve(device))
    torch.accelerator.synchronize(device)
    later(device, lambda: tensor.add_(10.0))
    snapshot.restore()
    restored = tensor.mean().item()
    torch.accelerator.synchronize(device)
    return restored, tensor.mean().item()


def test_a_snapshot_waits_for_every_stream(device: str) -> None:
    """What was submitted before is in the copy; what was submitted later does not come after it."""
    assert saved_and_restored(device) == (1.0, 1.0)


def test_without_waiting_state_would_be_torn(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made too soon, and the change after the snapshot outlives it."""
    monkeypatch.setattr(AcceleratorDevice, "synchronize", lambda device: None)
    assert saved_and_restored(device) != (1.0, 1.0)


class Trained:
    """A model in training on a device, with dropout, on streams."""

    def __init__(self, device: str) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.model.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.device = device

    def copy(self, ctx: IterContext) -> None:
        spin(0.2)
        ctx.x = ctx.batch.to(self.device, non_blocking=True)

    def forward(self, ctx: IterContext) -> None:
        spin(0.2)
        ctx.loss = self.model(ctx.x).square().mean()

    def step(self, ctx: IterContext) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()

    def tasks(self) -> list[PipelineTask]:
        """In serial order."""
        return [
            PipelineTask("copy", self.copy),
            PipelineTask("forward", self.forward, random=True),
            PipelineTask("step", self.step),
        ]

    def tensors(self) -> list[Tensor]:
        """Parameters and the optimizer's state, in place."""
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.parameters(), *moments]


PLAN = PipelinePlan(
    {
        "copy": TaskSchedule(0, "memcpy", "io"),
        "forward": TaskSchedule(1, "side"),
        "step": TaskSchedule(1),
    },
    deps=[("forward", "copy"), ("step", "forward")],
    cross_iter_deps=[("forward", "step", 1)],
)


def generators() -> list[Tensor]:
    """The states of the default generators of the host and of all devices."""
    module = torch.get_device_module(DEVICE.type)
    return [torch.get_rng_state(), *(module.get_rng_state(torch.device(d)) for d in DEVICES)]


def losses(pipe: SWPipeline, count: int) -> list[float]:
    """Of some iterations on the same batch."""
    return [ctx.loss.item() for ctx in pipe.iterate([torch.ones(4, 8)] * count)]


@contextmanager
def training(device: str) -> Any:
    """A model and its pipeline."""
    trained = Trained(device)
    with SWPipeline(PLAN, trained.tasks(), device=device, seed=3) as pipe:
        yield trained, pipe


@pytest.mark.parametrize("pipelined", [False, True], ids=["serially", "under the plan"])
def test_a_profile_leaves_the_training_as_it_was(device: str, pipelined: bool) -> None:
    """Parameters, momenta and generators are restored in place, in mid-training."""
    with training(device) as (trained, pipe):
        losses(pipe, 5)
        torch.accelerator.synchronize(device)
        tensors, before = trained.tensors(), [t.detach().cpu() for t in trained.tensors()]
        drawn = generators()
        TaskProfiler(pipe).profile(torch.ones(4, 8), 1, 3, 2, pipelined=pipelined)
        assert all(now is then for now, then in zip(trained.tensors(), tensors, strict=True))
        assert all(map(torch.equal, before, [t.detach().cpu() for t in tensors]))
        assert all(map(torch.equal, drawn, generators()))


def test_training_repeats_from_a_snapshot(device: str) -> None:
    """What is restored trains on to the same bits."""
    with training(device) as (trained, pipe):
        losses(pipe, 5)
        owners = [Owner("model", trained.model), Owner("optimizer", trained.optimizer)]
        snapshot = Snapshot(owners, resolve(device))
        state = [t.detach().cpu() for t in trained.tensors()]
        first, number = losses(pipe, 6), pipe.next_iteration
        snapshot.restore()
        assert all(map(torch.equal, state, [t.detach().cpu() for t in trained.tensors()]))
    with SWPipeline(PLAN, trained.tasks(), device=device, seed=3) as again:
        contexts = [again.run_one_serial_iter(torch.ones(4, 8), number - 6 + k) for k in range(6)]
        assert [ctx.loss.item() for ctx in contexts] == first
