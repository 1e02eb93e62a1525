"""Actions on one loop do not affect another one, which a second thread trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.inference import record
from swpipe.profiler import TaskProfiler
from tests.loops.ordinary_loops import Training


def batches(count: int) -> Iterator[Tensor]:
    """Return the same batches each time."""
    draws = torch.Generator().manual_seed(1)
    return (torch.rand(3, 4, generator=draws) for _ in range(count))


def trained() -> Callable[[Tensor], list[Tensor]]:
    """Return a step of a plain loop, which returns its loss and the parameters."""
    torch.manual_seed(0)
    parts = Training()

    def step(batch: Tensor) -> list[Tensor]:
        ctx = SimpleNamespace(batch=batch)
        for function in parts.functions():
            function(ctx)
        return [ctx.loss.detach(), *(one.detach().clone() for one in parts.model.parameters())]

    return step


def overlapped(tasks: list[PipelineTask]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with swpipe.overlap(list(batches(6)), tasks, device="cpu") as loop:
            assert len([*loop]) == 6


def recorded(tasks: list[PipelineTask]) -> None:
    record(tasks, next(batches(1)), device="cpu")


def checked(tasks: list[PipelineTask]) -> None:
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu", check_effects=True) as pipe:
        assert len([*pipe.iterate(batches(6))]) == 6


def profiled(tasks: list[PipelineTask]) -> None:
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        TaskProfiler(pipe).profile(next(batches(1)), num_warmup=1, num_measure=2, num_rounds=2)


@pytest.mark.parametrize("call", [overlapped, recorded, checked, profiled])
def test_another_threads_training_is_left_alone(call: Callable[[Any], None]) -> None:
    """It raises no error and has its own numbers: hooks and modes belong to one thread.

    It trains in the middle of each task.
    """
    theirs = trained()
    rows = batches(10_000)
    found: list[list[Tensor]] = []
    mine = Training()

    def beside(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(ctx: Any) -> None:
            function(ctx)
            thread.submit(lambda: found.append(theirs(next(rows)))).result()

        return run

    names = ("decode", "forward", "backward", "step")
    tasks = mine.tasks(**{name: beside(getattr(mine, name)) for name in names})
    with ThreadPoolExecutor(1) as thread:
        thread.submit(trained).result()  # the thread begins before there are hooks
        call([one if isinstance(one, PipelineTask) else swpipe.task(one) for one in tasks])
    assert len(found) >= len(names)
    alone = trained()
    torch.testing.assert_close(found, [alone(one) for one in batches(len(found))], rtol=0, atol=0)
