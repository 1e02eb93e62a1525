"""Lightning's ``training_step(dataloader_iter)`` over a pipeline: the numbers of its own loop.

Two epochs of ten batches, gradients accumulated over four, evaluation in mid-epoch. Lightning ends
an epoch when the last batch was pulled: a pipeline that pulls ahead from its iterator had then left
two batches untrained, and the second epoch was refused since they were in flight.
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
    """Lightning's own loop; the other modules give these functions to a pipeline."""

    automatic_optimization = False
    every = 4
    over_loop = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        self.seen: list[float] = []
        self.pipe: Any = None

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

    def training_step(self, *given: Any) -> None:
        batch, number = given
        ctx = IterContext(batch, BATCHES * self.current_epoch + number)
        for task in self.tasks():
            task(ctx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net(batch[0]).mean().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class OwnIterator(Own):
    """The same, with the step that gets the iterator."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        batch, number, _ = next(dataloader_iter)
        super().training_step(batch, number)


class OverContexts(Own):
    """The Trainer's loader is the loop: each of its batches is an iteration that is done."""

    over_loop = True

    def training_step(self, ctx: Any, batch_idx: int) -> None:  # type: ignore[override]
        """Nothing is left to do."""


class OverLoop(Own):
    """The same, with the step that gets the iterator."""

    over_loop = True

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        next(dataloader_iter)


class Driving(Own):
    """The pipeline pulls from Lightning's iterator, and is drained when that ends the epoch."""

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch[0][0] * 2  # of (batch, batch_idx, dataloader_idx)

    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        self.pipe.progress(dataloader_iter)
        if dataloader_iter.done:
            self.pipe.drain()


class Automatic(Own):
    """Lightning's own loop and steps."""

    automatic_optimization = True

    def training_step(self, *given: Any) -> Any:
        ctx = IterContext(*given)
        self.decode(ctx)
        self.compute(ctx)
        return ctx.loss


class Overlapped(Automatic):
    """The Trainer's loader is an overlapped loop, and the rest is Lightning's own."""

    over_loop = True

    def training_step(self, ctx: Any, batch_idx: int) -> Any:  # type: ignore[override]
        self.compute(ctx)
        return ctx.loss


@swpipe.task(pure=True)
def decode(ctx: Any) -> None:
    """Of an overlapped loop."""
    ctx.x = ctx.batch[0] * 2


def loop_of(module: Own, loader: Any) -> Any:
    """The loop that takes the loader's place."""
    if isinstance(module, Overlapped):
        return swpipe.overlap(loader, [decode], pull_ahead=True, device="cpu")
    # The Trainer's iterator is not apart from the Trainer, which looks whether it has ended.
    apart = {} if module.over_loop else {"pull_group": None, "depth": 4}
    plan = prefetch_plan(NAMES[:1], NAMES[1:], **apart)  # type: ignore[arg-type]
    module.pipe = SWPipeline(plan, module.tasks(), device="cpu")
    return swpipe.loops.ResumableLoop(module.pipe, loader)


def fit(module: Own, ckpt_path: Any = None, **options: Any) -> list[Any]:
    """Train; returns all numbers seen, and what is left."""
    torch.manual_seed(3)
    module.net.apply(lambda part: getattr(part, "reset_parameters", lambda: None)())
    rows = TensorDataset(torch.randn(4 * BATCHES - 2, 4))
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    options.setdefault("enable_checkpointing", False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loop = loop_of(module, loader)
    loop.counted = True
    with loop.pipe:
        over: Any = loop if module.over_loop else loader
        trainer.fit(module, over, DataLoader(rows, batch_size=8), ckpt_path=ckpt_path)
    return [module.seen, module.state_dict(), trainer.optimizers[0].state_dict()]


@pytest.mark.parametrize(
    ("own", "ours"), [(Own, OverContexts), (OwnIterator, OverLoop), (Automatic, Overlapped)]
)
def test_a_loop_in_place_of_the_loader_trains_as_lightning_does(own: Any, ours: Any) -> None:
    """Every batch, with the evaluations in mid-epoch where they would be."""
    expected = fit(own(), val_check_interval=4)
    assert len(expected[0]) >= 2 + EPOCHS * (BATCHES + 2 * 5)  # sanity check, batches, evaluation
    torch.testing.assert_close(fit(ours(), val_check_interval=4), expected, rtol=0, atol=0)


def test_a_pipeline_that_pulls_from_lightnings_iterator_is_drained_at_its_end() -> None:
    """No batch is left untrained, and the second epoch begins."""
    torch.testing.assert_close(fit(Driving()), fit(Own()), rtol=0, atol=0)


class NotDrained(Driving):
    """As above, but forgets the batches in flight."""

    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        self.pipe.progress(dataloader_iter)


def test_a_pipeline_that_is_not_drained_is_refused_in_the_second_epoch() -> None:
    """It would lose the batches in flight."""
    with pytest.raises(RuntimeError, match=r"are in flight \(3\): .*call drain\(\)"):
        fit(NotDrained())


@pytest.mark.parametrize("module", [OverLoop, Overlapped])
def test_lightnings_checkpoints_have_the_loops_state(module: Any, tmp_path: Path) -> None:
    """From the middle of an epoch, from its last batch, and from the second one."""
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {"accumulate_grad_batches": 5} if module is Overlapped else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Own, "every", 5)
        expected = fit(module(), enable_checkpointing=True, callbacks=[saver], **options)
        # A checkpoint of the last batch is from before the evaluation, which is not repeated.
        for step, left in ((1, 5 + 5 + 10 + 5), (2, 10 + 5), (3, 5 + 5)):
            found = fit(module(), tmp_path / f"step={step}.ckpt", **options)
            assert found[0][-left:] == expected[0][-left:]
            assert len(found[0]) <= left + 5
            torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)
