"""What is done to one loop leaves another alone, which a second thread trains at the same time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.profiler import TaskProfiler
from tests.loops.ordinary_loops import Training

ROUNDS = 5


class Trained(Training):
    """A model with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def both(self, batch: Tensor) -> Tensor:
        """One iteration of a plain loop."""
        ctx = SimpleNamespace(batch=batch)
        for function in self.functions():
            function(ctx)
        return ctx.loss.detach()  # type: ignore[no-any-return]

    def pieces(self) -> list[PipelineTask]:
        """The same as tasks."""
        return [one if isinstance(one, PipelineTask) else swpipe.task(one) for one in self.tasks()]


def batches(count: int) -> Iterator[Tensor]:
    """The same each time."""
    draws = torch.Generator().manual_seed(1)
    return (torch.rand(3, 4, generator=draws) for _ in range(count))


def overlapped(mine: Trained) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with swpipe.overlap(list(batches(6)), mine.pieces(), device="cpu") as loop:
            assert len([*loop]) == 6


def recorded(mine: Trained) -> None:
    record(mine.pieces(), next(batches(1)), device="cpu")


def checked(mine: Trained) -> None:
    tasks = mine.pieces()
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu", check_effects=True) as pipe:
        assert len([*pipe.iterate(batches(6))]) == 6


def profiled(mine: Trained) -> None:
    tasks = mine.pieces()
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        TaskProfiler(pipe).profile(next(batches(1)), num_warmup=1, num_measure=2, num_rounds=2)


@pytest.mark.parametrize("call", [overlapped, recorded, checked, profiled])
def test_another_threads_training_is_left_alone(call: Callable[[Trained], None]) -> None:
    """No error in it, and its own numbers: hooks and modes belong to one thread and one run."""
    failures: list[BaseException] = []
    losses: list[Tensor] = []
    ready, stop = threading.Event(), threading.Event()
    theirs = Trained()

    def train() -> None:
        try:
            for batch in batches(100_000):
                if stop.is_set():
                    break
                losses.append(theirs.both(batch))
                ready.set()
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        ready.wait(60)
        for _ in range(ROUNDS):
            call(Trained())
    finally:
        stop.set()
        thread.join(60)
    assert not failures
    alone = Trained()
    expected = [alone.both(batch) for batch in batches(len(losses))]
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    for parameter, own in zip(theirs.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(parameter, own)
