"""Metrics of training that do not make the host wait for the device at every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from swpipe.device import on_cpu
from swpipe.tasks.workload import TrainingFailedError


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

    def __init__(self, device: torch.device, bins: int = 2000) -> None:
        super().__init__()
        self.bins = bins
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.zeros(2 * bins, dtype=torch.int64, device=device))

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: logits [B], labels [B] of 0 and 1."""
        probability = torch.sigmoid(logits.detach()).nan_to_num(0.0)
        bin_ = (probability * self.bins).long().clamp_(max=self.bins - 1)
        slot = bin_ + self.bins * labels.long()
        seen = torch.zeros_like(self.counts).scatter_add_(0, slot, torch.ones_like(slot))
        self.counts = self.counts + seen

    def compute(self) -> float:
        """The area, 0 to 1; NaN until both labels have been seen. Waits for the device."""
        return self.area(self.counts)

    def area(self, counts: torch.Tensor) -> float:
        """As ``compute``, of another histogram, such as the sum of several ranks'."""
        negatives, positives = counts.view(2, self.bins).double().cpu()
        below = negatives.cumsum(0) - negatives
        pairs = negatives.sum() * positives.sum()
        won = (positives * (below + negatives / 2)).sum()
        return float(won / pairs) if pairs else math.nan


class TrainingDivergedError(TrainingFailedError):
    """The loss is no longer a number; training on would only spoil the model.

    Attributes:
        step: The first such step, from 0.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss became NaN or infinite at step {step} (the first is 0): "
            "lower the learning rate, or look at that step's rows"
        )
        self.step = step


class LossGuard:
    """Stops training when a loss is not finite.

    On a CPU each loss is checked. On a device with streams that would make the host wait, so the
    device keeps the first bad step, and the host checks every ``interval`` steps.

    Args:
        device: Where losses come from.
        interval: Steps between checks on a device with streams.
    """

    _NONE = torch.iinfo(torch.int64).max

    def __init__(self, device: torch.device, interval: int = 100) -> None:
        self.first_bad = torch.full((), self._NONE, dtype=torch.int64, device=device)
        self.interval = 1 if on_cpu(self.first_bad) else interval

    def watch(self, loss: torch.Tensor, step: int) -> None:
        """Check a loss, or keep it to be checked.

        Args:
            loss: A scalar.
            step: Its step, from 0.

        Raises:
            TrainingDivergedError: This loss, or one since the last check, is not finite.
        """
        here = torch.where(torch.isfinite(loss.detach()), self._NONE, step)
        torch.minimum(self.first_bad, here, out=self.first_bad)
        if (step + 1) % self.interval == 0:
            self.check()

    def check(self) -> None:
        """Check now. Waits for the device.

        Raises:
            TrainingDivergedError: A loss was not finite.
        """
        first = int(self.first_bad)
        if first != self._NONE:
            raise TrainingDivergedError(first)
