"""The click job: a model, its data, and one training step cut into tasks.

What goes through the context, attribute by attribute::

    ctx.batch -- read --> raw -- decode --> frame, rejected -- hash --> host -- copy --> inputs
    inputs -- embed --> embedded -- forward --> logits, loss
    loss -- backward --> (gradients) -- step --> (parameters)
    logits, inputs -- auc --> (histogram)

What stands in parentheses lies outside the context: in the model, in its optimizer, in the metric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.feed import AnyClickJob
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer


class ClickJob(AnyClickJob[ClickModel]):
    """A click model in training, in one process.

    Args:
        config: What to train on what. The data files are scanned for line ends here.

    Raises:
        ClickDataError: A data file is missing or empty.
    """

    def __init__(self, config: ClickConfig) -> None:
        super().__init__(config)
        self.model = ClickModel(config.model, config.seed).to(self.device)
        self._parameters = tuple(self.model.parameters())
        self.optimizer = make_optimizer(self._parameters, config.model.learning_rate)

    # ------------------------------------------------------------------- tasks

    def hash(self, ctx: IterContext) -> None:
        """Ids into buckets, all into tensors on the host."""
        ctx.host = self._on_host(encode(ctx.frame, self.config.model.buckets))
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
        reads = DeclaredIO(state="model parameters", mode="r", memory=self.model)
        gradients = DeclaredIO(self._get_gradients, self._set_gradients, "model gradients")
        updates = [
            DeclaredIO(state="model gradients", mode="r"),
            DeclaredIO(state="model parameters"),
            DeclaredIO(state="optimizer state"),
        ]
        return (
            *self._feed(),
            PipelineTask("copy", self.copy, pure=True),
            PipelineTask("embed", self.embed, io=[reads]),
            PipelineTask("forward", self.forward, io=[reads, self._guarded()]),
            PipelineTask("backward", self.backward, io=[reads, gradients]),
            # Not run, it leaves the parameters as its last run did: that is its replay.
            PipelineTask("step", self.step, io=updates),
            PipelineTask("auc", self.update_auc, io=[self._histogram()]),
        )

    def _get_gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    # ---------------------------------------------------- plans and evaluation

    def plan(self, name: str = "pipelined") -> PipelinePlan:
        """A ready-made plan: "serial" or "pipelined"."""
        return PLANS[name]()

    def _predict(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch)
        return click_loss(logits, batch.labels), logits
