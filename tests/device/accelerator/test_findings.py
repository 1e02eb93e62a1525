"""Findings about device work: each planted fault is found at its line; clean loops have none."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.device import resolve
from swpipe.reporting.waits import sync_debug
from tests.device.accelerator.work import DEVICE
from tests.reporting.examined import examined, rules

NAMES = ("CUDA_DEV", "CUDA_LAUNCH", "HIP", "AMD", "OMP", "KMP", "PYTORCH", "NCCL", "TORCH_NCCL")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environment of this machine."""
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        monkeypatch.delenv(name)


def copy(ctx: IterContext) -> None:
    """Copy the batch without blocking."""
    ctx.x = ctx.batch.to(DEVICE, non_blocking=True)


def training(*more: Callable[[IterContext], None], first: Any = copy) -> list[PipelineTask]:
    """Return the tasks of a training on the device; ``more`` run after the backward."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def forward(ctx: IterContext) -> None:
        ctx.loss = model(ctx.x).square().mean()

    def backward(ctx: IterContext) -> None:
        ctx.loss.backward()

    def step(ctx: IterContext) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return [PipelineTask(fn.__name__, fn) for fn in (first, forward, backward, *more, step)]


def batches() -> list[Tensor]:
    """Return batches in pinned memory."""
    return [torch.ones(4, 8).pin_memory() for _ in range(3)]


def last_line(fn: Any) -> str:
    """Return the place of a function's last line, as findings name it."""
    lines, first = inspect.getsourcelines(fn)
    return (
        f"tests/device/accelerator/test_findings.py:{first + len(lines) - 1}, task {fn.__name__!r}"
    )


def plan_of(tasks: list[PipelineTask]) -> PipelinePlan:
    """Return a plan with the first task on a stream of its own."""
    schedule = {task: TaskSchedule(1) for task in tasks}
    schedule[tasks[0]] = TaskSchedule(0, stream="side")
    return PipelinePlan(schedule)


# ------------------------------------------------------------------------------------------ clean


def test_a_clean_loop_has_no_findings() -> None:
    """It copies from pinned memory, trains and clips; sums stay on the device."""
    total = torch.zeros((), device=DEVICE)

    def add(ctx: IterContext) -> None:
        total.add_(ctx.loss.detach())

    def copy(ctx: IterContext) -> None:
        ctx.x = torch.empty(4, 8, device=DEVICE).copy_(ctx.batch, non_blocking=True)

    tasks = training(add, first=copy)
    assert rules(examined(tasks, batches(), plan=plan_of(tasks))) == []


def test_a_clean_loop_with_masks_has_no_findings() -> None:
    """Shapes do not depend on data; an exchange comes first; a value is read late."""
    out = torch.zeros(()).pin_memory()

    def exchange(ctx: IterContext) -> None:
        ctx.x = ctx.batch.to(DEVICE, non_blocking=True) * 2.0

    def mask(ctx: IterContext) -> None:
        ctx.y = torch.where(ctx.x > 0, ctx.x, 0.0)
        ctx.y[ctx.y > 1] = 1.0
        ctx.z = ctx.y[ctx.order]
        out.copy_(ctx.loss.detach(), non_blocking=True)

    def order(ctx: IterContext) -> None:
        ctx.order = torch.arange(4, device=DEVICE)

    tasks = training(order, mask, first=exchange)
    assert rules(examined(tasks, batches(), plan=plan_of(tasks))) == []


# ---------------------------------------------------------------------------------------- planted


def item(ctx: IterContext) -> None:
    ctx.value = ctx.loss.item()


def branch(ctx: IterContext) -> None:
    ctx.large = 1 if ctx.loss > 3 else 0


def to_host(ctx: IterContext) -> None:
    ctx.host = ctx.x.cpu()


def to_pageable(ctx: IterContext) -> None:
    torch.zeros(4, 8).copy_(ctx.x, non_blocking=True)


def selected(ctx: IterContext) -> None:
    ctx.rows = ctx.x[ctx.x > 0]


def positions(ctx: IterContext) -> None:
    ctx.at = ctx.x.nonzero()


def written(ctx: IterContext) -> None:
    ctx.x.detach()[ctx.x > 0] = torch.ones(32, device=DEVICE)


def listed(ctx: IterContext) -> None:
    ctx.scale = torch.tensor([1.0, 2.0], device=DEVICE)


SYNC, SHAPE = "host-sync", "shape-from-data"
WAITS = {
    item: SYNC,
    branch: SYNC,
    to_host: SYNC,
    to_pageable: SYNC,
    selected: SHAPE,
    positions: SHAPE,
    written: SHAPE,
    listed: "unpinned-copy",
}


def test_each_wait_for_the_device_is_found() -> None:
    """It has its line, once per iteration; a tensor of values is an unpinned copy."""
    found = examined(training(*WAITS), batches())
    assert sorted(rules(found)) == sorted((rule, last_line(fn)) for fn, rule in WAITS.items())
    assert all(one.text.endswith("; 1 per iteration") for one in found)


def unpinned(ctx: IterContext) -> None:
    ctx.x = ctx.batch.clone().to(DEVICE, non_blocking=True)


def blocking(ctx: IterContext) -> None:
    ctx.x = ctx.batch.to(DEVICE)


@pytest.mark.parametrize(("fault", "rule"), [(unpinned, "unpinned-copy"), (blocking, "host-sync")])
def test_a_copy_that_does_not_overlap_is_found(fault: Any, rule: str) -> None:
    """It comes from unpinned memory, or is blocking."""
    assert rules(examined(training(first=fault), batches())) == [(rule, last_line(fault))]


def test_a_wait_in_an_autograd_function_is_found() -> None:
    """Autograd's own threads run it; the task is named, if not the line."""

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float(grad.sum())

    def seen(ctx: IterContext) -> None:
        w = torch.ones(8, device=DEVICE, requires_grad=True)
        Reading.apply(w).sum().backward()

    ((rule, place),) = rules(examined(training(seen), batches()))
    assert rule == "host-sync"
    assert place.endswith("task 'seen'")


@pytest.mark.parametrize("name", ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"])
def test_a_variable_that_keeps_streams_in_turn_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It allows one connection for several streams, or makes kernels block."""
    monkeypatch.setenv(name, "1")
    rule = "connections" if "CONNECTIONS" in name else "blocking-setting"
    assert rules(examined(training(), batches())) == [(rule, f"{name}=1")]


def test_more_streams_than_connections_are_found() -> None:
    """CUDA has 8 by default."""
    tasks = training()
    more = [PipelineTask(f"t{i}", lambda ctx: None) for i in range(8)]
    schedule = {
        **{task: TaskSchedule() for task in tasks},
        **{task: TaskSchedule(stream=task.name) for task in more},
    }
    found = examined([*tasks, *more], batches(), plan=PipelinePlan(schedule))
    assert rules(found) == [("connections", "CUDA_DEVICE_MAX_CONNECTIONS=8")]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=9" in found[0].fix


def test_what_torch_tells_of_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's sync debug mode, if any, warns of a wait that no operator shows."""
    modes: list[Any] = []
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "get_sync_debug_mode", lambda: 0, raising=False)
    monkeypatch.setattr(module, "set_sync_debug_mode", modes.append, raising=False)

    text = "called a synchronizing CUDA operation"

    def told(ctx: IterContext) -> None:
        on = modes[-1:] == ["warn"]
        ctx.value = (ctx.loss.item(), on and warnings.warn(text, stacklevel=1))  # known already
        if on:
            warnings.warn(text, stacklevel=1)

    found = examined(training(told), batches())
    lines = [int(place.partition(",")[0].rpartition(":")[2]) for _, place in rules(found)]
    assert [rule for rule, _ in rules(found)] == ["host-sync", "host-sync"]
    assert lines[1] == lines[0] + 2
    assert modes[-2:] == ["warn", 0]


def test_other_warnings_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync debug mode catches its own warnings only."""
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "get_sync_debug_mode", lambda: 0, raising=False)
    monkeypatch.setattr(module, "set_sync_debug_mode", lambda mode: None, raising=False)
    waits: list[int] = []

    def warn() -> None:
        with sync_debug(resolve(DEVICE), lambda: waits.append(1)):
            warnings.warn("mine", stacklevel=1)
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    with pytest.warns(UserWarning, match="mine"):
        warn()
    assert waits == [1]
