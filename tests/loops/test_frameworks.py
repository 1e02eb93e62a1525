"""Loops of Accelerate, Fabric and Lightning give the same numbers when they are overlapped.

Each runs for two epochs of ten batches, accumulates four of them, lowers its rate and evaluates in
the middle of an epoch. Accelerate steps at the end of an epoch, whatever it has accumulated: it
once stepped at other iterations, since its loader tells of the batch that was pulled last.
"""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import lightning
import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import IterContext, PipelineTask
from tests.loops.framework_loops import (
    EPOCHS,
    MIDDLE,
    STEPS,
    OfAccelerate,
    OfFabric,
    decode,
    loaders,
    network,
    plainly,
    train,
)
from tests.loops.ordinary_loops import Training, batches

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


def test_accelerate_steps_at_the_end_of_each_epoch() -> None:
    """And the last batch of a pass is told as such, after the loader has ended."""
    loop = OfAccelerate()
    overlapped(loop)
    assert loop.steps == STEPS
    assert not GradientState().in_dataloader


def test_bfloat16_of_accelerate() -> None:
    """Its wrapper of forward casts."""
    torch.manual_seed(3)
    expected = plainly(OfAccelerate(mixed_precision="bf16"))
    torch.manual_seed(3)
    found = overlapped(OfAccelerate(mixed_precision="bf16"))
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


def test_a_task_that_asks_accelerate_comes_after_the_flags_are_shown() -> None:
    """Whether it uses the accelerator, or the state by its class."""
    loop = OfAccelerate()

    def note(ctx: Any) -> None:
        ctx.last = GradientState().end_of_dataloader

    def count(ctx: Any) -> None:
        ctx.remainder = loop.accelerator.gradient_state.remainder

    tasks = [decode, note, count, *loop.tasks[1:]]
    with swpipe.overlap(loop.loader, tasks, pull_ahead=True, device="cpu") as contexts:
        assert contexts.overlap.ahead == ("unpack batch", "decode")
        found = [(ctx.last, ctx.remainder) for ctx in contexts]
    assert found == [(False, 2)] * 9 + [(True, 2)]


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


class OfLightning(lightning.LightningModule):
    """The step gets a batch, or the context of one that is decoded."""

    def __init__(self, ahead: bool) -> None:
        super().__init__()
        self.model = network()
        self.ahead = ahead
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.ahead:
            batch = IterContext(batch, batch_idx)
            decode(batch)
        loss: Tensor = self.model(batch.x).square().mean()
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.model(batch[0]).mean().item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(ahead: bool) -> list[Any]:
    """Train with the Trainer; the same numbers are expected either way."""
    torch.manual_seed(3)
    module = OfLightning(ahead)
    loader, rows = loaders()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        val_check_interval=MIDDLE + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if ahead:
        with swpipe.overlap(loader, [decode], pull_ahead=True, device="cpu") as contexts:
            assert contexts.overlap.ahead == ("decode",)
            trainer.fit(module, contexts, rows)
    else:
        trainer.fit(module, loader, rows)
    return [module.seen, module.state_dict(), trainer.optimizers[0].state_dict()]


def test_a_trainer_of_lightning_takes_an_overlapped_loader() -> None:
    """Its loops, accumulation and evaluation stay as they are; all batches are trained on."""
    expected, found = fit(ahead=False), fit(ahead=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(found[0]) == 2 + EPOCHS * (10 + 2 * 5)  # sanity check, training, evaluation


def test_a_task_that_uses_what_the_body_trains_stays_with_the_body() -> None:
    """Nobody has said that it does not; the loader runs ahead."""

    def losses(ahead: bool) -> list[float]:
        torch.manual_seed(3)
        parts = Training()

        def features(ctx: Any) -> None:
            ctx.loss = parts.model(ctx.batch).square().mean()

        def body(ctx: Any) -> float:
            parts.backward(ctx)
            parts.step(ctx)
            return float(ctx.loss.item())

        if not ahead:
            plain = [IterContext(batch, i) for i, batch in enumerate(batches())]
            return [body(ctx) for ctx in plain if not features(ctx)]  # type: ignore[func-returns-value]
        with swpipe.overlap(batches(num_workers=1), [features], device="cpu") as loop:
            assert loop.overlap.ahead == ()
            return [body(ctx) for ctx in loop]

    assert losses(ahead=True) == losses(ahead=False)


def test_frozen_features_run_ahead() -> None:
    """What no training changes may be used early."""
    frozen = network().eval().requires_grad_(False)
    features = PipelineTask("features", lambda ctx: setattr(ctx, "x", frozen(ctx.batch)), pure=True)
    with swpipe.overlap([torch.ones(2, 4)] * 3, [features], device="cpu") as contexts:
        assert contexts.overlap.ahead == ("features",)
        assert len({float(ctx.x.sum()) for ctx in contexts}) == 1
