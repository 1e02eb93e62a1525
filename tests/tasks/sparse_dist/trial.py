"""One training of a job, by TorchRec's own base pipeline or by ours, and what came out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swpipe.tasks.sparse_dist import PipelineFactory
from tests.tasks.sparse_dist.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import TrainPipelineBase

EXACT = (
    "jagged_sw_serial",
    "jagged_sparse_dist",
    "jagged_prefetch_sparse_dist",
    "jagged_split_sparse_dist",
)
"""Pipelines whose numbers are those of a plain loop."""


@dataclass(frozen=True)
class Outcome:
    """What a training left.

    Attributes:
        outputs: The model's output for each batch.
        state: Parameters at the end, those of the tables as far as this rank has them.
    """

    outputs: list[Tensor]
    state: dict[str, Tensor]

    def differences(self, other: Outcome) -> list[str]:
        """Where two trainings differ, in any bit."""
        found = [
            f"output {k}"
            for k, (a, b) in enumerate(zip(self.outputs, other.outputs))
            if not torch.equal(a, b)
        ]
        if len(self.outputs) != len(other.outputs):
            found.append(f"{len(self.outputs)} and {len(other.outputs)} outputs")
        if self.state.keys() != other.state.keys():
            found.append("the names of the parameters")
        return found + [
            k
            for k in self.state
            if k in other.state and not torch.equal(self.state[k], other.state[k])
        ]


def to_the_end(pipeline: Any, data: Iterator[Batch]) -> list[Tensor]:
    """Every output, until StopIteration."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(data))
        except StopIteration:
            return outputs


def by_torchrec(job: Job, steps: int) -> Outcome:
    """What TorchRec's unpipelined pipeline makes of a job."""
    model = sharded(job)
    pipeline = TrainPipelineBase(model, dense_optimizer(job, model), CPU)
    return Outcome(to_the_end(pipeline, batches(steps)), everything(model))


def by_name(name: str, job: Job, steps: int, **options: Any) -> Outcome:
    """What one of our pipelines makes of it."""
    model = sharded(job)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(job, model), device=CPU, **options
    ) as pipeline:
        outputs = to_the_end(pipeline, batches(steps))
    return Outcome(outputs, everything(model))


def differences(
    job: Job, steps: int, names: tuple[str, ...] = EXACT, **options: Any
) -> dict[str, list[str]]:
    """For each of our pipelines, where it differs from TorchRec's base; empty where it does not."""
    wanted = by_torchrec(job, steps)
    found = {name: by_name(name, job, steps, **options).differences(wanted) for name in names}
    return {name: where for name, where in found.items() if where}
