"""Lightning's ``training_step(dataloader_iter)`` over a pipeline has the numbers of its own loop.

Two epochs of ten batches, gradients accumulated over four, evaluation in mid-epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.plans import prefetch_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning.*",
    "ignore::FutureWarning:lightning.*",
    "ignore::DeprecationWarning:lightning.*",
)

BATCHES, EPOCHS = 10, 2
NAMES = ["decode", "compute", "differentiate", "update"]


class Own(lightning.LightningModule):
    """A module with Lightning's own loop; subclasses run its functions in a pipeline."""

    automatic_optimization = False
    every = 4
    over_loop = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        self.seen: list[float] = []

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch[0] * 2

    def compute(self, ctx: Any) -> None:
        ctx.loss = self.net(ctx.x).square().mean()
        self.seen.append(ctx.loss.item())

    def differentiate(self, ctx: Any) -> None:
        self.manual_backward(ctx.loss / 4)

    def update(self, ctx: Any) -> None:
        if (ctx.iter_idx + 1) % self.every == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def tasks(self) -> list[PipelineTask]:
        return [PipelineTask(n, getattr(self, n), pure=n == "decode") for n in NAMES]

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, number, _ = next(dataloader_iter)
        ctx = IterContext(batch, BATCHES * self.current_epoch + number)
        for task in self.tasks():
            task(ctx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net(batch[0]).mean().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class OverLoop(Own):
    """A module whose Trainer iterates over the loop; its batches are finished iterations."""

    over_loop = True

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        next(dataloader_iter)


def fit(module: Own, ckpt_path: Any = None, **options: Any) -> list[Any]:
    """Train; return all numbers seen, and the final state."""
    torch.manual_seed(3)
    module.net.apply(lambda part: getattr(part, "reset_parameters", lambda: None)())
    rows = TensorDataset(torch.randn(4 * BATCHES - 2, 4))
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True)
    options.setdefault("enable_checkpointing", False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    plan = prefetch_plan(NAMES[:1], NAMES[1:])
    over = loader
    with SWPipeline(plan, module.tasks(), device="cpu") as pipe:
        if module.over_loop:
            over = swpipe.loops.ResumableLoop(pipe, loader)
            over.counted = True
        trainer.fit(module, over, DataLoader(rows, batch_size=8), ckpt_path=ckpt_path)
    return [module.seen, module.state_dict(), trainer.optimizers[0].state_dict()]


def test_a_loop_in_place_of_the_loader_trains_as_lightning_does() -> None:
    """It trains on every batch, with the evaluations at the same steps."""
    expected = fit(Own(), val_check_interval=4)
    assert len(expected[0]) >= 2 + EPOCHS * (BATCHES + 2 * 5)  # sanity check, batches, evaluation
    torch.testing.assert_close(fit(OverLoop(), val_check_interval=4), expected, rtol=0, atol=0)


def test_lightnings_checkpoints_have_the_loops_state(tmp_path: Path) -> None:
    """They are made in the middle of an epoch, and at its last batch."""
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Own, "every", 5)
        expected = fit(OverLoop(), enable_checkpointing=True, callbacks=[saver])
        # A checkpoint of the last batch is from before the evaluation, which is not repeated.
        for step, left in ((1, 5 + 5 + 10 + 5), (2, 10 + 5)):
            found = fit(OverLoop(), tmp_path / f"step={step}.ckpt")
            assert found[0][-left:] == expected[0][-left:]
            assert len(found[0]) <= left + 5
            torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)
