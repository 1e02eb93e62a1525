"""What a ranking job in training reports, without making the host wait for the device each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
