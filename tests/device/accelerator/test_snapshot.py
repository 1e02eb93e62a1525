"""State on an accelerator is saved after the work that changes it, and restored before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import SWPipeline, TaskProfiler
from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import Owner
from swpipe.device import AcceleratorDevice, resolve
from tests.device.accelerator.training import PLANS, Training, batches, means, on_host, same
from tests.device.accelerator.work import DEVICE, spin, warm_up

DEVICES = [f"{DEVICE.type}:{index}" for index in range(torch.accelerator.device_count())]
LATE_MS = 20.0


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device, with device 0 as the caller's current device."""
    warm_up()
    return str(request.param)


def later(device: str, change: Callable[[], Any]) -> None:
    """Submit ``change`` to a separate stream that is busy at first."""
    with torch.accelerator.device_index(torch.device(device).index or 0):
        stream = torch.Stream(device=device)
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        spin(LATE_MS)
        change()
        torch.accelerator.set_stream(before)


def saved_and_restored(device: str) -> tuple[float, float]:
    """Save and restore a tensor around late changes; return it at once, and after a synchronize."""
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
    """Work that was submitted before is in the copy; later work is not."""
    assert saved_and_restored(device) == (1.0, 1.0)


def test_without_waiting_state_would_be_torn(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made too early, and the change after the snapshot survives it."""
    monkeypatch.setattr(AcceleratorDevice, "synchronize", lambda device: None)
    assert saved_and_restored(device) != (1.0, 1.0)


def generators() -> list[Tensor]:
    """Return the states of the default generators of the host and of all devices."""
    module = torch.get_device_module(DEVICE.type)
    return [torch.get_rng_state(), *(module.get_rng_state(torch.device(d)) for d in DEVICES)]


PLAN = PLANS["three threads, three streams"]


@contextmanager
def training(device: str) -> Any:
    """Yield a training and its pipeline."""
    made = Training(device, random.Random(1))
    with SWPipeline(PLAN, made.tasks(), device=device, seed=3) as pipe:
        yield made, pipe


def test_a_profile_leaves_the_training_as_it_was() -> None:
    """Parameters, moments and generators are restored in place, in mid-training."""
    with training(DEVICES[-1]) as (made, pipe):
        means(pipe, batches(1) * 5)
        tensors, before = made.tensors(), on_host(made.tensors())
        drawn = generators()
        TaskProfiler(pipe).profile(*batches(1), 1, 1, 2, pipelined=True)
        assert all(now is then for now, then in zip(made.tensors(), tensors, strict=True))
        assert same(before, on_host(tensors))
        assert same(drawn, generators())


def test_training_repeats_from_a_snapshot(device: str) -> None:
    """Training from the restored state gives the same bits."""
    with training(device) as (made, pipe):
        means(pipe, batches(1) * 5)
        snapshot = Snapshot([Owner(*one) for one in made.owners().items()], resolve(device))
        state = on_host(made.tensors())
        first, number = on_host(means(pipe, batches(1) * 6)), pipe.next_iteration
        snapshot.restore()
        assert same(state, on_host(made.tensors()))
    with SWPipeline(PLAN, made.tasks(), device=device, seed=3) as again:
        contexts = [again.run_one_serial_iter(*batches(1), number - 6 + k) for k in range(6)]
        assert same(on_host([ctx.mean for ctx in contexts]), first)
