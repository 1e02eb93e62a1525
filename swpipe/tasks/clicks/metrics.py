"""What a ranking job in training reports, without making the host wait for the device each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swpipe.core.task import DeclaredIO
from swpipe.tasks.clicks.log import ClickDataError
from swpipe.tasks.workload import Job

_EXAMPLES = 5  # malformed rows that are shown


class RunningAUC(nn.Module):
    """Area under the ROC curve of all predictions seen so far, from a histogram of them.

    Memory and cost per step do not grow with the rows seen, and the device is asked for nothing
    until ``compute``. Rows whose probabilities fall into one bin count as ties.

    Args:
        device: Where the histogram lives.
        bins: Of equal width, over probabilities from 0 to 1.

    Attributes:
        counts: [2 * bins] int64: negatives by bin, then positives. ``update`` replaces it and never
            modifies it, so it can be kept and put back.
    """

    counts: torch.Tensor

    def __init__(self, device: torch.device, bins: int = 2000) -> None:
        super().__init__()
        self.bins = bins
        self.register_buffer("counts", torch.zeros(2 * bins, dtype=torch.int64, device=device))

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: logits [B], labels [B] of 0 and 1."""
        probability = torch.sigmoid(logits.detach()).nan_to_num(0.0)
        bin_ = (probability * self.bins).long().clamp_(max=self.bins - 1)
        slot = bin_ + self.bins * labels.long()
        seen = torch.zeros_like(self.counts).scatter_add_(0, slot, torch.ones_like(slot))
        self.counts = self.counts + seen

    def compute(self, counts: torch.Tensor | None = None) -> float:
        """The area, 0 to 1; NaN until both labels have been seen. Waits for the device.

        Args:
            counts: Another histogram, such as the sum of several ranks'.
        """
        counts = self.counts if counts is None else counts
        negatives, positives = counts.view(2, self.bins).double().cpu()
        below = negatives.cumsum(0) - negatives
        pairs = negatives.sum() * positives.sum()
        won = (positives * (below + negatives / 2)).sum()
        return float(won / pairs) if pairs else math.nan


@dataclass
class RowCount:
    """Rows read in the first epoch.

    Attributes:
        lines: All of them.
        malformed: Those dropped.
        examples: The first few of these.
    """

    lines: int = 0
    malformed: int = 0
    examples: list[Any] = field(default_factory=list)

    def add(self, lines: int, rejected: Sequence[Any]) -> None:
        """Count the rows of a batch, and those of them that were dropped."""
        self.lines += lines
        self.malformed += len(rejected)
        self.examples += rejected[: _EXAMPLES - len(self.examples)]

    def __str__(self) -> str:
        if not self.malformed:
            return f"{self.lines:,} rows, none malformed"
        told = f"{self.lines:,} rows, {self.malformed:,} of them malformed and dropped:"
        shown = [f"  {row}" for row in self.examples[:_EXAMPLES]]
        if self.malformed > len(shown):
            shown.append(f"  ... and {self.malformed - len(shown):,} more")
        return "\n".join((told, *shown))


class RankingJob(Job):
    """A job whose model predicts a label per row: its rows and its running AUC.

    Args:
        device: Where the model lives.

    Attributes:
        device: As given.
        auc: Over all rows trained on, each predicted before the model was updated with it.
        rows: Read so far, by this rank.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.auc = RunningAUC(self.device)
        self.rows = RowCount()

    def spec(self, ctx: Any) -> Any:
        """What a trained batch has read: ``rows``, in the ``epoch`` of that number, from 0."""
        raise NotImplementedError

    def retired(self, ctx: Any) -> float | torch.Tensor | None:
        if (spec := self.spec(ctx)).epoch == 0:  # later epochs read the same rows
            self.rows.add(spec.rows, getattr(ctx, "rejected", ()))
        return super().retired(ctx)

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

    def notes(self) -> list[str]:
        return [f"data: {self.all_rows()}"]

    def _histogram(self) -> DeclaredIO:
        """The running AUC's state."""
        return DeclaredIO(lambda: self.auc.counts, self._set_histogram, "auc", memory=self.auc)

    def _set_histogram(self, counts: torch.Tensor) -> None:
        self.auc.counts = counts
