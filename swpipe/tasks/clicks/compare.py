"""Compare runs of one job under different plans: results bit for bit, and speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swpipe.tasks.clicks.train import Range, TrainRun


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run differs from another of the same config under another plan.

    Attributes:
        first_loss: The first step whose losses differ in any bit, from 0; None where none does.
        parameters: Names of parameters that differ in any bit.
    """

    first_loss: int | None
    parameters: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """All losses and all parameters are equal, bit for bit."""
        return self.first_loss is None and not self.parameters


def compare(a: TrainRun[Any], b: TrainRun[Any]) -> Comparison:
    """Compare losses and parameters by bits, on all ranks.

    Raises:
        ValueError: The runs are not of the same length.
    """
    if len(a.losses) != len(b.losses):
        raise ValueError(
            f"{a.name} ran {len(a.losses)} steps and {b.name} {len(b.losses)}: run both alike first"
        )
    apart = (
        step
        for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True))
        if not torch.equal(x, y)
    )
    theirs = dict(b.job.model.named_parameters())
    parameters = tuple(
        name for name, mine in a.job.model.named_parameters() if not torch.equal(mine, theirs[name])
    )
    found = a.job.over_ranks(Comparison(next(apart, None), parameters))
    first = min((one.first_loss for one in found if one.first_loss is not None), default=None)
    return Comparison(first, tuple(sorted({name for one in found for name in one.parameters})))


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one run relative to another.

    Attributes:
        ratio: Steps per second over the other's; of both, the median over the turns.
        between: The least and the greatest ratio that a turn of each can have; None where one of
            the runs had one turn only.
    """

    ratio: float
    between: Range | None

    @property
    def differs(self) -> bool:
        """Every turn of one run was faster than every turn of the other."""
        return self.between is not None and not self.between.least <= 1 <= self.between.most


def speed(first: TrainRun[Any], run: TrainRun[Any]) -> Speed:
    """How fast ``run`` is relative to ``first``, by the figures that each run shows for itself."""
    a, b = first.range_per_s, run.range_per_s
    between = Range(b.least / a.most, b.most / a.least) if a and b else None
    return Speed(run.steps_per_s / first.steps_per_s, between)
