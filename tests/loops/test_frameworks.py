"""Loops of Accelerate, Fabric and Lightning give the same numbers when they are overlapped.

Each runs for two epochs of ten batches, accumulates four of them, lowers its rate and evaluates in
the middle of an epoch. Accelerate steps at the end of an epoch, whatever it has accumulated: it
once stepped at other iterations, since its loader tells of the batch that was pulled last.
"""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from tests.loops.framework_loops import (
    EPOCHS,
    OfAccelerate,
    OfFabric,
    decode,
    loaders,
    plainly,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning.*",
    "ignore::FutureWarning:lightning.*",
    "ignore::UserWarning:torch.optim.lr_scheduler",
)


def overlapped(loop: Any) -> list[Any]:
    """With one call more."""
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        assert contexts.overlap.loader_ahead
        assert "decode" in contexts.overlap.ahead
        return train(loop, (contexts for _ in range(EPOCHS)))


@pytest.mark.parametrize("make", [OfAccelerate, OfFabric])
def test_an_overlapped_loop_equals_the_tools_own(make: Any) -> None:
    """Losses, rates, flags, gathered rows, evaluations, states and random numbers."""
    torch.manual_seed(3)
    expected = plainly(make())
    torch.manual_seed(3)
    found = overlapped(make())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_prepared_loader_with_workers_runs_ahead_without_a_word() -> None:
    """Accelerate's samplers are known, also one that seeds itself in each pass."""

    def made() -> OfAccelerate:
        torch.manual_seed(3)
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        loop = OfAccelerate(dataloader_config=config)
        loop.loader = loop.accelerator.prepare(loaders(num_workers=1)[0])
        return loop

    expected, loop = plainly(made()), made()
    with swpipe.overlap(loop.loader, loop.tasks, device="cpu") as contexts:
        assert contexts.overlap.ahead == ("unpack batch", "decode")
        found = train(loop, (contexts for _ in range(EPOCHS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_loop_over_a_prepared_loader_that_is_left_begins_anew() -> None:
    """Accelerate forgets the pass that was left."""
    loop = OfAccelerate()
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        for ctx in contexts:
            if ctx.iter_idx == 2:
                break
        assert not GradientState().in_dataloader
        ends = [GradientState().end_of_dataloader for _ in contexts]
    assert ends == [False] * 9 + [True]
    assert isinstance(loop.loader.gradient_state, GradientState)
    assert [type(batch) for batch in loop.loader] == [list] * 10


@pytest.mark.parametrize("stopped", [0, 6, 9, 12, 18])
def test_a_loop_of_accelerate_goes_on_where_it_was_stopped(stopped: int) -> None:
    """In the middle of an accumulation, at the end of an epoch, and in the second one."""

    def train_from(loop: OfAccelerate, contexts: Any, epoch: int) -> list[Any]:
        return [
            (ctx.iter_idx, ctx.loss.item(), loop.body(ctx), save(loop, contexts, ctx, number))
            for number in range(epoch, EPOCHS)
            for ctx in contexts
        ]

    def save(loop: OfAccelerate, contexts: Any, ctx: Any, epoch: int) -> None:
        if ctx.iter_idx == stopped:
            parts = (loop.model, loop.optimizer, loop.scheduler, contexts)
            states = [copy.deepcopy(part.state_dict()) for part in parts]
            gradients = [copy.deepcopy(each.grad) for each in loop.model.parameters()]
            saved.append((epoch, loop.accelerator.step, gradients, states))

    saved: list[Any] = []
    torch.manual_seed(3)
    loop = OfAccelerate()
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        expected = train_from(loop, contexts, 0)
    epoch, step, gradients, states = saved.pop()
    torch.manual_seed(3)
    loop = OfAccelerate()  # the same rows
    torch.manual_seed(4)
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        loop.loader.set_epoch(epoch)
        loop.accelerator.step = step
        for parameter, gradient in zip(loop.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        parts = (loop.model, loop.optimizer, loop.scheduler, contexts)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        found = train_from(loop, contexts, epoch)
    torch.testing.assert_close(found, expected[stopped + 1 :], rtol=0, atol=0, equal_nan=True)


def test_a_loader_that_sends_batches_to_other_processes_is_refused() -> None:
    """Its collectives would run beside those of tasks."""
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 4))))
    with pytest.raises(ValueError, match=r"DataLoaderDispatcher.*dispatch_batches=False"):
        swpipe.overlap(loader, [decode], pull_ahead=True, device="cpu")


@pytest.mark.parametrize("wrap", [lambda loader: (batch for batch in loader), iter])
def test_a_prepared_loader_in_a_generator_is_refused(wrap: Any) -> None:
    """Its flags would be those of a later batch. Accelerate forgets it; what to give is said."""
    loop = OfAccelerate()
    with swpipe.overlap(wrap(loop.loader), loop.tasks, pull_ahead=True, device="cpu") as contexts:
        with pytest.raises(RuntimeError, match="Accelerate prepared.*or ahead the loader itself"):
            list(contexts)
    assert not GradientState().in_dataloader
