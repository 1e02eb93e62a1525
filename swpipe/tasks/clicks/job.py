"""The click job: a model, its data, and one training step cut into tasks.

What goes through the context, attribute by attribute::

    ctx.batch -- read --> raw -- decode --> frame, rejected -- hash --> host -- copy --> inputs
    inputs -- embed --> embedded -- forward --> logits, loss
    loss -- backward --> (gradients) -- step --> (parameters)
    logits, inputs -- auc --> (histogram)

What stands in parentheses lies outside the context: in the model, in its optimizer, in the metric.
On the way to the device each task deletes what it took: an iteration in flight holds its batch in
one form only, and the thread that feeds also does the freeing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swpipe.context import IterContext
from swpipe.plan import PipelinePlan
from swpipe.plans.clicks import PLANS
from swpipe.task import DeclaredIO, PipelineTask
from swpipe.tasks.clicks._torchrec import BinaryAUROC
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import encode
from swpipe.tasks.clicks.log import BatchSpec, ClickLog
from swpipe.tasks.clicks.metrics import LossGuard, RunningAUC
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the model does on rows that it was not trained on.

    Attributes:
        rows: How many.
        loss: Mean binary cross-entropy.
        auc: Area under the ROC curve, exact; NaN unless there are clicks and others.
    """

    rows: int
    loss: float
    auc: float


class ClickJob:
    """A click model in training.

    Args:
        config: What to train on what. The data files are scanned for line ends here.

    Attributes:
        config: As given.
        log: The rows to train on.
        model: Trained by ``step``.
        optimizer: Does so.
        auc: Over all rows trained on, each predicted before it was learned from.
        guard: Stops training when the loss is not finite.

    Raises:
        ClickDataError: A data file is missing or empty.
    """

    def __init__(self, config: ClickConfig) -> None:
        self.config = config
        self.log = ClickLog(config.data, config.batch_size)
        self.held_out = ClickLog(config.held_out, config.batch_size) if config.held_out else None
        self.device = torch.device(config.device)
        self.model = ClickModel(config.model, config.seed).to(self.device)
        self.optimizer = make_optimizer(self.model, config.model)
        self.auc = RunningAUC(self.device)
        self.guard = LossGuard(self.device)
        self._parameters = tuple(self.model.parameters())

    # ------------------------------------------------------------------- tasks

    def read(self, ctx: IterContext) -> None:
        """Bytes of the batch's lines."""
        spec: BatchSpec = ctx.batch
        ctx.raw = b"".join([part.read() for part in spec.ranges])

    def decode(self, ctx: IterContext) -> None:
        """Typed columns of the good rows; the malformed ones."""
        decoded = decode(ctx.raw, ctx.batch.ranges, self.config.strict)
        ctx.frame, ctx.rejected = decoded.frame, decoded.rejected
        del ctx.raw

    def hash(self, ctx: IterContext) -> None:
        """Ids into buckets, all into tensors on the host."""
        batch = encode(ctx.frame, self.config.model.buckets)
        ctx.host = batch.pin_memory() if self.device.type == "cuda" else batch
        del ctx.frame

    def copy(self, ctx: IterContext) -> None:
        """The tensors, on the device."""
        ctx.inputs = ctx.host.to(self.device)
        del ctx.host

    def embed(self, ctx: IterContext) -> None:
        """Embeddings of the ids."""
        ctx.embedded = self.model.embed(ctx.inputs)

    def forward(self, ctx: IterContext) -> None:
        """Logits and loss; a loss that is not finite ends the training."""
        ctx.logits = self.model.predict(ctx.inputs, ctx.embedded)
        ctx.loss = click_loss(ctx.logits, ctx.inputs.labels)
        self.guard.watch(ctx.loss, ctx.batch.step)

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
        gradients = DeclaredIO(self._get_gradients, self._set_gradients)
        histogram = DeclaredIO(self._get_histogram, self._set_histogram)
        return (
            PipelineTask("read", self.read),
            PipelineTask("decode", self.decode),
            PipelineTask("hash", self.hash),
            PipelineTask("copy", self.copy),
            PipelineTask("embed", self.embed),
            PipelineTask("forward", self.forward),
            PipelineTask("backward", self.backward, io=[gradients]),
            # Not run, it leaves the parameters as its last run did: that is its replay.
            PipelineTask("step", self.step),
            PipelineTask("auc", self.update_auc, io=[histogram]),
        )

    def _get_gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _get_histogram(self) -> torch.Tensor:
        return self.auc.counts

    def _set_histogram(self, counts: torch.Tensor) -> None:
        self.auc.counts = counts

    # ----------------------------------------------------------- data and plans

    def batches(self, steps: int | None = None) -> Iterator[BatchSpec]:
        """Addresses of batches: one epoch, or ``steps`` of them over as many epochs as it takes."""
        return self.log.batches(steps)

    def plan(self, name: str = "pipelined") -> PipelinePlan:
        """A ready-made plan: "serial" or "pipelined"."""
        return PLANS[name]()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Predict the held-out rows. Malformed ones are left out.

        Raises:
            RuntimeError: The config names no held-out files.
        """
        if self.held_out is None:
            raise RuntimeError(
                "there is nothing to evaluate on: name files in ClickConfig.held_out"
            )
        exact = BinaryAUROC(thresholds=None, validate_args=False).to(self.device)
        loss, rows, clicked = 0.0, 0, 0
        for spec in self.held_out.batches():
            data = b"".join([part.read() for part in spec.ranges])
            frame = decode(data, spec.ranges).frame
            inputs = encode(frame, self.config.model.buckets).to(self.device)
            logits = self.model(inputs)
            loss += float(click_loss(logits, inputs.labels)) * frame.height
            rows += frame.height
            clicked += int(inputs.labels.sum())
            exact.update(logits.sigmoid(), inputs.labels.long())
        auc = float(exact.compute()) if 0 < clicked < rows else math.nan
        return Evaluation(rows, loss / max(rows, 1), auc)
