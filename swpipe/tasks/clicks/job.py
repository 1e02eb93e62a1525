"""The click job: a model, its data, and one training step cut into tasks.

What goes through the context, attribute by attribute::

    ctx.batch -- read --> raw -- decode --> frame, rejected -- hash --> host -- copy --> inputs
    inputs -- embed --> embedded -- forward --> logits, loss
    loss -- backward --> (gradients) -- step --> (parameters)
    logits, inputs -- auc --> (histogram)

What stands in parentheses lies outside the context: in the model, in its optimizer, in the metric.
Each task that feeds deletes its input from the context: an iteration in flight holds its batch in
one form only, and the thread that allocates also frees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import resolve
from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.log import BatchSpec, ClickDataError, ClickLog
from swpipe.tasks.clicks.metrics import RowCount, RunningAUC
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer
from swpipe.tasks.workload import Job, gradients_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on rows that the model was not trained on.

    Attributes:
        rows: How many.
        loss: Mean binary cross-entropy.
        auc: Area under the ROC curve, as of ``RunningAUC``; NaN unless there are clicks and others.
    """

    rows: int
    loss: float
    auc: float


class AnyClickJob(Job):
    """A click model in training, in one process or on several ranks.

    Attributes:
        config: What to train on what.
        log: The rows to train on.
        held_out: The rows to evaluate on; None where the config names none.
        model: What is trained.
        optimizer: Does so.
        size: The number of ranks.
        device: Where the model lives.
        auc: Over all rows trained on, each predicted before the model was updated with it.
        rows: Read so far, by this rank.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    size: int = 1

    def __init__(self, config: ClickConfig) -> None:
        self.device = torch.device(config.device)
        self.auc = RunningAUC(self.device)
        self.rows = RowCount()
        self.config = config
        self.log = ClickLog(config.data, config.batch_size)
        self.held_out = ClickLog(config.held_out, config.batch_size) if config.held_out else None
        self._pins_memory = resolve(self.device).pins_memory

    # ------------------------------------------------------------------- tasks

    def read(self, ctx: IterContext) -> None:
        """Bytes of the batch's lines."""
        ctx.raw = ctx.batch.read()

    def decode(self, ctx: IterContext) -> None:
        """Typed columns of the good rows; the malformed ones."""
        ctx.frame, ctx.rejected = decode(ctx.raw, ctx.batch, self.config.strict)
        del ctx.raw

    def hash(self, ctx: IterContext) -> None:
        """Ids into buckets, all into tensors on the host."""
        raise NotImplementedError

    def _encoded(self, ctx: IterContext) -> ClickBatch:
        """Tensors in memory that the device can copy from, in place of the columns."""
        batch = encode(ctx.frame, self.config.model.buckets)
        del ctx.frame
        return batch.pin_memory() if self._pins_memory else batch

    def _feed(self) -> tuple[PipelineTask, ...]:
        """The tasks that bring a batch from its file to tensors on the host."""
        fns = {"read": self.read, "decode": self.decode, "hash": self.hash}
        return tuple(PipelineTask(name, fn, pure=True) for name, fn in fns.items())

    # ----------------------------------------------------------------- reports

    def retired(self, ctx: Any) -> float | torch.Tensor | None:
        if (spec := self.spec(ctx)).epoch == 0:  # later epochs read the same rows
            self.rows.add(spec.rows, getattr(ctx, "rejected", ()))
        return super().retired(ctx)

    def spec(self, ctx: Any) -> BatchSpec:
        """Where the rows of a trained batch lie."""
        spec: BatchSpec = ctx.batch
        return spec

    def check(self) -> None:
        rows = self.all_rows()
        if rows.lines and rows.malformed == rows.lines:
            raise ClickDataError(
                f"not one good row among {rows.lines}; the first: {rows.examples[0]}"
            )

    def all_rows(self) -> RowCount:
        """Rows read so far, by all ranks. A collective."""
        total = RowCount()
        for one in self.over_ranks(self.rows):
            total.lines += one.lines
            total.malformed += one.malformed
            total.examples += one.examples
        return total

    def auc_of_all(self) -> float:
        """The running AUC over all ranks; NaN until both labels have been seen. A collective."""
        return self.auc.compute(torch.stack(self.over_ranks(self.auc.counts.cpu())).sum(0))

    def results(self) -> dict[str, str]:
        return {"AUC": f"{self.auc_of_all():.4f}".replace("nan", "n/a")}

    def _histogram(self) -> DeclaredIO:
        """The running AUC's state."""
        return DeclaredIO(lambda: self.auc.counts, self._set_histogram, "auc", memory=self.auc)

    def _set_histogram(self, counts: torch.Tensor) -> None:
        self.auc.counts = counts

    # -------------------------------------------------------------------- data

    @property
    def epoch_steps(self) -> int:
        """How many steps once through the data takes."""
        return math.ceil(len(self.log) / self.size)

    def batches(self, steps: int | None = None, /) -> Iterator[BatchSpec]:
        """Addresses of this rank's batches: one epoch, or ``steps`` over as many as it takes."""
        return self._share(self.log, steps)

    def _share(self, log: ClickLog, steps: int | None = None) -> Iterator[BatchSpec]:
        """This rank's part of a log."""
        return log.batches(steps)

    # -------------------------------------------------------------- evaluation

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Predict the held-out rows, each rank its share; the same result on all.

        Malformed rows are left out.

        Raises:
            RuntimeError: The config names no held-out files, or iterations of a sharded job are in
                flight.
        """
        if self.held_out is None:
            raise RuntimeError(
                "there is nothing to evaluate on: name files in ClickConfig.held_out"
            )
        loss, rows, seen = 0.0, 0, RunningAUC(self.device)
        for spec in self._share(self.held_out):
            frame = decode(spec.read(), spec).frame
            batch = encode(frame, self.config.model.buckets).to(self.device)
            mean, logits = self._predict(batch)
            seen.update(logits, batch.labels)
            loss, rows = loss + float(mean) * frame.height, rows + frame.height
        losses, counts, histograms = zip(
            *self.over_ranks((loss, rows, seen.counts.cpu())), strict=True
        )
        auc = seen.compute(torch.stack(histograms).sum(0))
        return Evaluation(sum(counts), sum(losses) / max(sum(counts), 1), auc)

    def _predict(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """The mean loss and the logits of a batch on the device."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """The evaluation, and the rows."""
        rows = f"data: {self.all_rows()}"
        if self.held_out is None:
            return [rows]
        found = self.evaluate()
        auc = f"{found.auc:.4f}".replace("nan", "n/a")
        told = f"held-out rows: AUC {auc}, loss {found.loss:.4f}, {found.rows:,} rows"
        return [told, rows]


class ClickJob(AnyClickJob):
    """A click model in training, in one process.

    Args:
        config: What to train on what. The data files are scanned for line ends here.

    Raises:
        ClickDataError: A data file is missing or empty.
    """

    model: ClickModel

    def __init__(self, config: ClickConfig) -> None:
        super().__init__(config)
        self.model = ClickModel(config.model, config.seed).to(self.device)
        self.modules = (self.model,)
        parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(parameters, config.model.learning_rate)

    def hash(self, ctx: IterContext) -> None:
        ctx.host = self._encoded(ctx)

    def copy(self, ctx: IterContext) -> None:
        """The tensors, on the device."""
        ctx.inputs = ctx.host.to(self.device)
        del ctx.host

    def embed(self, ctx: IterContext) -> None:
        """Embeddings of the ids."""
        ctx.embedded = self.model.embed(ctx.inputs)

    def forward(self, ctx: IterContext) -> None:
        """Logits and loss."""
        ctx.logits = self.model.predict(ctx.inputs, ctx.embedded)
        ctx.loss = click_loss(ctx.logits, ctx.inputs.labels)

    def backward(self, ctx: IterContext) -> None:
        """Gradients of this loss alone, in place of those of the step before."""
        self.optimizer.zero_grad(set_to_none=True)
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        """Parameters, from the gradients."""
        self.optimizer.step()

    def update_auc(self, ctx: IterContext) -> None:
        """Count the predictions into the running AUC."""
        self.auc.update(ctx.logits, ctx.inputs.labels)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """One training step, in the order of a plain loop."""
        # The loop only reads losses: what is trained is compared and evaluated after the last step.
        reads = DeclaredIO(state="model parameters", mode="r", memory=self.model, others="")
        gradients = gradients_of(self.modules, "model gradients", others="")
        updates = [
            DeclaredIO(state="model gradients", mode="r"),
            DeclaredIO(state="model parameters"),
            DeclaredIO(state="optimizer state", others=""),
        ]
        return (
            *self._feed(),
            PipelineTask("copy", self.copy, pure=True),
            PipelineTask("embed", self.embed, io=[reads]),
            PipelineTask("forward", self.forward, io=[reads]),
            PipelineTask("backward", self.backward, io=[reads, gradients]),
            # Not run, it leaves the parameters as its last run did: that is its replay.
            PipelineTask("step", self.step, io=updates),
            PipelineTask("auc", self.update_auc, io=[self._histogram()]),
        )

    def plan(self, name: str = "pipelined") -> PipelinePlan:
        """A ready-made plan: "serial" or "pipelined"."""
        return PLANS[name]()

    def _predict(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch)
        return click_loss(logits, batch.labels), logits
