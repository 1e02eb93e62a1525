"""A shortcut replays its task's outputs on the stream that the task is on now."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.device.cpu import NoEvent
from swpipe.shortcut.cache import Cache
from tests.device.accelerator.training import PLANS, badly, batches, same, trained
from tests.device.accelerator.work import DEVICE, SIMULATED, extremes, filled, spin, warm_up, wrong

LATE_MS = 20.0
NUMBERS = count()
"""New memory may hold what an earlier test left there, so no two have the same values."""


def replayed_elsewhere() -> list[int]:
    """Replay on the caller's stream what was cached late on stream "side"."""
    seen: dict[int, Tensor] = {}
    number = next(NUMBERS)

    def make(ctx: IterContext) -> None:
        spin(LATE_MS)
        ctx.x = filled(number + 1)

    tasks = {PipelineTask("make", make): TaskSchedule(0, "side")}
    plan = PipelinePlan(tasks, pipeline_depth=2)  # the end of the data comes before the device's
    warm_up()
    other = torch.Stream(device=DEVICE)
    with SWPipeline(plan, device=DEVICE) as pipe, pipe.shortcut("make"):
        list(pipe.iterate(range(1)))
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(other)  # which has waited for nothing
        try:
            seen[number] = extremes(pipe.run_one_serial_iter(0).x)
            if SIMULATED:
                other.synchronize()
        finally:
            torch.accelerator.set_stream(before)
    return wrong(seen)


def test_a_replay_waits_for_the_cache() -> None:
    """The cache may have been made on another stream, which has not finished it."""
    assert replayed_elsewhere() == []


def test_without_the_wait_it_would_be_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaying stream reads memory that is not written yet."""
    begin = Cache.__init__

    def careless(cache: Any, *args: Any) -> None:
        begin(cache, *args)
        cache._ready = NoEvent()

    monkeypatch.setattr(Cache, "__init__", careless)
    assert replayed_elsewhere() != []


def trained_with(plan: PipelinePlan | None, seed: int, *names: str) -> list[Tensor]:
    """Train on one batch, with shortcuts from the third iteration on."""
    (batch,) = batches(1)
    return trained(plan, seed, [batch] * 2, [batch] * 8, [batch] * 2, shortcuts=names)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("copy on its stream", ("scale",)),
        ("three threads, three streams", ("copy", "scale")),
        ("backward on another thread", ("forward",)),
    ],
)
def test_training_with_shortcuts_has_the_serial_runs_bits(
    name: str, names: tuple[str, ...]
) -> None:
    """Inputs, and a loss with its graph, are replayed on late streams with poisoned memory."""
    serial = trained_with(None, 1, *names)
    with badly():
        assert same(serial, trained_with(PLANS[name], 2, *names))
