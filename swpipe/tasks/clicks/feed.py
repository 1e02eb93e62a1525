"""What all click jobs share: reading and decoding rows, and metrics.

Reading, decoding and hashing are tasks of their own. Each deletes its input from the context: an
iteration in flight holds its batch in one form only, and the thread that allocates also frees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import resolve
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch
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

    Args:
        config: What to train on what. The data files are scanned for line ends here.

    Attributes:
        config: As given.
        device: Where the model lives.
        log: The rows to train on.
        held_out: The rows to evaluate on; None where the config names none.
        model: What is trained.
        optimizer: Does so.
        auc: Over all rows trained on, each predicted before the model was updated with it.
        guard: Stops training when the loss is not finite.
        size: The number of ranks.

    Raises:
        ClickDataError: A data file is missing or empty.
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
    def tasks(self) -> tuple[PipelineTask, ...]:
        """One training step, in the order of a plain loop."""

    def _on_host(self, batch: ClickBatch) -> ClickBatch:
        """Tensors in memory that the device can copy from."""
        return batch.pin_memory() if self._pins_memory else batch

    def _histogram(self) -> DeclaredIO:
        """The running AUC's state, for shortcuts."""
        return DeclaredIO(self._get_histogram, self._set_histogram)

    def _get_histogram(self) -> torch.Tensor:
        return self.auc.counts

    def _set_histogram(self, counts: torch.Tensor) -> None:
        self.auc.counts = counts

    # -------------------------------------------------------------------- data

    @property
    def epoch_steps(self) -> int:
        """How many steps once through the data takes."""
        return len(self.log)

    def batches(self, steps: int | None = None) -> Iterator[BatchSpec]:
        """Addresses of batches: one epoch, or ``steps`` of them over as many epochs as it takes."""
        return self.log.batches(steps)

    def spec(self, ctx: IterContext) -> BatchSpec:
        """Where the rows of a trained batch lie."""
        spec: BatchSpec = ctx.batch
        return spec

    # ------------------------------------------------------------------- ranks

    def over_ranks(self, value: T) -> list[T]:
        """The values of all ranks; a job in one process is one rank."""
        return [value]

    # -------------------------------------------------------------- evaluation

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Predict the held-out rows. Malformed ones are left out.

        Raises:
            RuntimeError: The config names no held-out files.
        """

    def _to_evaluate(self) -> ClickLog:
        if self.held_out is None:
            raise RuntimeError(
                "there is nothing to evaluate on: name files in ClickConfig.held_out"
            )
        return self.held_out

    def close(self) -> None:
        """Release what the job holds beside memory."""


def bytes_of(spec: BatchSpec) -> bytes:
    """The lines of one batch."""
    return b"".join([part.read() for part in spec.ranges])
