"""Each planted fault is found, and nothing else; clean loops have no findings.

Faults of device work are planted in ``tests/device/accelerator/test_findings.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, TaskSchedule
from tests.profiler.sleepers import contend, sleeper
from tests.reporting.examined import examined, rules
from tests.support.bare import bare_environment
from tests.support.virtual_clock import TimedHost

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environment of this machine."""
    bare_environment(monkeypatch)


def training() -> list[PipelineTask]:
    """Return a pure task, and the training of a small model."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def decode(ctx: IterContext) -> None:
        batch = ctx.batch[0] if isinstance(ctx.batch, list) else ctx.batch
        ctx.x = batch * 2.0

    def forward(ctx: IterContext) -> None:
        ctx.loss = model(ctx.x).square().mean()

    def backward(ctx: IterContext) -> None:
        ctx.loss.backward()

    def step(ctx: IterContext) -> None:
        optimizer.step()
        optimizer.zero_grad()

    rest = [PipelineTask(fn.__name__, fn) for fn in (forward, backward, step)]
    return [PipelineTask("decode", decode, pure=True), *rest]


def waiting(host: TimedHost) -> PipelineTask:
    """Return a task that waits longest on the host's clock."""
    return PipelineTask("wait", sleeper(host, 5))


def batches() -> list[Tensor]:
    """Return batches in memory."""
    return list(torch.ones(3, 4, 8))


def of_data(**options: Any) -> DataLoader[Any]:
    """Return torch's loader of such batches, with long passes, since each one starts workers."""
    return DataLoader(TensorDataset(torch.ones(4096, 8)), batch_size=4, **options)


# ------------------------------------------------------------------------------------------ clean


def test_a_clean_loop_with_a_worker_has_no_findings(host: TimedHost) -> None:
    """The loop's thread only takes the workers' batches; a plan has its threads."""
    tasks = [*training(), waiting(host)]
    plan = PipelinePlan(
        {t: TaskSchedule(thread_group="io" if t.name == "decode" else "default") for t in tasks}
    )
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        assert rules(examined(tasks, of_data(num_workers=1), plan=plan)) == []
        assert set(multiprocessing.active_children()) <= before  # its workers have ended
    finally:
        gc.enable()


def test_a_clean_loop_over_a_list_has_no_findings() -> None:
    """It has batches in memory, and reads a loss that is on the host anyway."""
    log = PipelineTask("log", lambda ctx: ctx.loss.item())
    assert examined([*training(), log], batches()) == ()


def test_all_state_is_put_back() -> None:
    """An examination leaves the training as it was."""
    weight = nn.Parameter(torch.ones(8))

    def train(ctx: IterContext) -> None:
        (ctx.batch * weight).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)

    examined([PipelineTask("train", train)], batches())
    assert torch.equal(weight, torch.ones(8))


# ---------------------------------------------------------------------------------------- planted


class Made(Dataset[Tensor]):
    """A dataset of samples that are computed when they are indexed."""

    def __init__(self, host: TimedHost, ms: float) -> None:
        self._host, self._ms = host, ms

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self._host.compute(self._ms / 1e3)
        return torch.ones(8)


def test_a_loader_in_this_process_is_found(host: TimedHost) -> None:
    """Its batches take 4 ms between two steps, on the CPU."""
    found = examined(training(), DataLoader(Made(host, 1), batch_size=4))
    assert rules(found) == [("loader-in-process", "loader")]
    assert "4.000 ms of a step" in found[0].text
    assert "on the CPU" in found[0].text


class Slow(SequentialSampler):
    """A sampler that takes 4 ms for each index."""

    def __init__(self, host: TimedHost, source: Dataset[Any]) -> None:
        super().__init__(source)  # type: ignore[arg-type]
        self._host = host

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self._host.sleep(1e-3)
            yield index


def test_workers_that_are_too_slow_are_no_finding(host: TimedHost) -> None:
    """The loop waits for a loader that works ahead: the advice of the profile says so."""
    data = TensorDataset(torch.ones(4096, 8))
    loader = DataLoader(data, 4, sampler=Slow(host, data), num_workers=1)
    assert rules(examined(training(), loader)) == []


PURE: dict[str, Any] = {"pure": True}
TRAINS = {"io": [DeclaredIO(state="model")]}


@pytest.mark.parametrize(
    ("holds", "declared", "is_found"),
    [(True, PURE, True), (False, PURE, False), (True, {}, False), (True, TRAINS, False)],
)
def test_a_task_that_holds_the_interpreter_lock_is_found(
    host: TimedHost,
    monkeypatch: pytest.MonkeyPatch,
    holds: bool,
    declared: dict[str, Any],
    is_found: bool,
) -> None:
    """It is all Python, and another process could run it: a task that trains is none."""
    contender = contend(monkeypatch, host)

    def parse(ctx: IterContext) -> None:
        host.compute(1e-3)
        contender.held_s += 0.0 if holds else 1e-3

    found = examined([PipelineTask("parse", parse, **declared), waiting(host)], batches())
    told = [("interpreter-lock", "task 'parse'")]
    assert rules(found) == (told if is_found else [])
