"""What all click jobs share: reading and decoding rows, and metrics.

Reading, decoding and hashing are tasks of their own. Each deletes its input from the context: an
iteration in flight holds its batch in one form only, and the thread that allocates also frees.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import resolve
from swpipe.tasks.clicks._torchrec import BinaryAUROC
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.log import BatchSpec, ClickLog
from swpipe.tasks.clicks.metrics import LossGuard, RunningAUC

Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on rows that the model was not trained on.

    Attributes:
        rows: How many.
        loss: Mean binary cross-entropy.
        auc: Area under the ROC curve, exact; NaN unless there are clicks and others.
    """

    rows: int
    loss: float
    auc: float


class AnyClickJob(ABC, Generic[Model]):
    """A click model in training.

    Attributes:
        config: What to train on what.
        device: Where the model lives.
        log: The rows to train on.
        held_out: The rows to evaluate on; None where the config names none.
        model: What is trained.
        optimizer: Does so.
        auc: Over all rows trained on, each predicted before the model was updated with it.
        guard: Stops training when the loss is not finite.
        size: The number of ranks.
    """

    model: Model
    optimizer: torch.optim.Optimizer
    size: int = 1

    def __init__(self, config: ClickConfig) -> None:
        self.config = config
        self.log = ClickLog(config.data, config.batch_size)
        self.held_out = ClickLog(config.held_out, config.batch_size) if config.held_out else None
        self.device = torch.device(config.device)
        self.auc = RunningAUC(self.device)
        self.guard = LossGuard(self.device)
        self._pins_memory = resolve(self.device).pins_memory

    # ------------------------------------------------------------------- tasks

    def read(self, ctx: IterContext) -> None:
        """Bytes of the batch's lines."""
        ctx.raw = bytes_of(ctx.batch)

    def decode(self, ctx: IterContext) -> None:
        """Typed columns of the good rows; the malformed ones."""
        decoded = decode(ctx.raw, ctx.batch.ranges, self.config.strict)
        ctx.frame, ctx.rejected = decoded.frame, decoded.rejected
        del ctx.raw

    @abstractmethod
    def hash(self, ctx: IterContext) -> None:
        """Ids into buckets, all into tensors on the host."""

    @abstractmethod
    def tasks(self) -> tuple[PipelineTask, ...]:
        """One training step, in the order of a plain loop."""

    def _on_host(self, batch: ClickBatch) -> ClickBatch:
        """Tensors in memory that the device can copy from."""
        return batch.pin_memory() if self._pins_memory else batch

    def _feed(self) -> tuple[PipelineTask, ...]:
        """The tasks that bring a batch from its file to tensors on the host."""
        fns = {"read": self.read, "decode": self.decode, "hash": self.hash}
        return tuple(PipelineTask(name, fn, pure=True) for name, fn in fns.items())

    def _histogram(self) -> DeclaredIO:
        """The running AUC's state."""
        return DeclaredIO(lambda: self.auc.counts, self._set_histogram, "auc", memory=self.auc)

    def _guarded(self) -> DeclaredIO:
        """The loss guard's state."""
        return DeclaredIO(state="loss guard")

    def _set_histogram(self, counts: torch.Tensor) -> None:
        self.auc.counts = counts

    # -------------------------------------------------------------------- data

    @property
    def epoch_steps(self) -> int:
        """How many steps once through the data takes."""
        return math.ceil(len(self.log) / self.size)

    def batches(self, steps: int | None = None) -> Iterator[BatchSpec]:
        """Addresses of this rank's batches: one epoch, or ``steps`` of them.

        ``steps`` may take several epochs.
        """
        return self._share(self.log, steps)

    def _share(self, log: ClickLog, steps: int | None = None) -> Iterator[BatchSpec]:
        """This rank's part of a log."""
        return log.batches(steps)

    def spec(self, ctx: IterContext) -> BatchSpec:
        """Where the rows of a trained batch lie."""
        spec: BatchSpec = ctx.batch
        return spec

    # ------------------------------------------------------------------- ranks

    def over_ranks(self, value: T) -> list[T]:
        """The values of all ranks; a job in one process is one rank."""
        return [value]

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
        loss, logits, labels = 0.0, [torch.empty(0)], [torch.empty(0)]
        for spec in self._share(self.held_out):
            frame = decode(bytes_of(spec), spec.ranges).frame
            batch = encode(frame, self.config.model.buckets).to(self.device)
            mean, predicted = self._predict(batch)
            loss += float(mean) * frame.height
            logits.append(predicted.cpu())
            labels.append(batch.labels.cpu())
        found = self.over_ranks((loss, torch.cat(logits), torch.cat(labels)))
        all_logits = torch.cat([one[1] for one in found])
        all_labels = torch.cat([one[2] for one in found])
        rows = len(all_labels)
        exact = BinaryAUROC(thresholds=None, validate_args=False)
        exact.update(all_logits.sigmoid(), all_labels.long())
        auc = float(exact.compute()) if 0 < all_labels.sum() < rows else math.nan
        return Evaluation(rows, sum(one[0] for one in found) / max(rows, 1), auc)

    @abstractmethod
    def _predict(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """The mean loss and the logits of a batch on the device."""

    def close(self) -> None:
        """Release what the job holds beside memory."""


def bytes_of(spec: BatchSpec) -> bytes:
    """The lines of one batch."""
    return b"".join([part.read() for part in spec.ranges])
