"""What is done to one loop leaves another alone, which a second thread trains at the same time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.profiler import TaskProfiler

ROUNDS = 5


class Training:
    """A model with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=True)

    def step(self, batch: Tensor) -> Tensor:
        """One iteration of a plain loop."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tasks(self) -> list[PipelineTask]:
        """The same as tasks."""

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch * 2.0

        def train(ctx: Any) -> None:
            ctx.loss = self.step(ctx.x)

        return [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]


def batches(count: int) -> Iterator[Tensor]:
    """The same each time."""
    draws = torch.Generator().manual_seed(1)
    return (torch.rand(3, 4, generator=draws) for _ in range(count))


def overlapped(mine: Training) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with swpipe.overlap(list(batches(6)), mine.tasks(), device="cpu") as loop:
            assert len([*loop]) == 6


def recorded(mine: Training) -> None:
    record(mine.tasks(), next(batches(1)), device="cpu")


def checked(mine: Training) -> None:
    tasks = mine.tasks()
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu", check_effects=True) as pipe:
        assert len([*pipe.iterate(batches(6))]) == 6


def profiled(mine: Training) -> None:
    tasks = mine.tasks()
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        TaskProfiler(pipe).profile(next(batches(1)), num_warmup=1, num_measure=2, num_rounds=2)


@pytest.mark.parametrize("call", [overlapped, recorded, checked, profiled])
def test_another_threads_training_is_left_alone(call: Callable[[Training], None]) -> None:
    """No error in it, and its own numbers: hooks and modes belong to one thread and one run."""
    failures: list[BaseException] = []
    losses: list[Tensor] = []
    ready, stop = threading.Event(), threading.Event()
    theirs = Training()

    def train() -> None:
        try:
            for batch in batches(100_000):
                if stop.is_set():
                    break
                losses.append(theirs.step(batch))
                ready.set()
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        ready.wait(20)
        for _ in range(ROUNDS):
            call(Training())
    finally:
        stop.set()
        thread.join(20)
    assert not failures
    alone = Training()
    expected = [alone.step(batch) for batch in batches(len(losses))]
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    for parameter, own in zip(theirs.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(parameter, own)
