"""A model and batches like those of recsys-examples, and a plain training loop for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.torchrec.recsys_examples import TrainPipelineFactory
from tests.tasks.torchrec.megatron import megatrons
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    KeyedJaggedTensor,
    Model,
    batches,
    dense_optimizer,
    everything,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, to_the_end

EXACT = (
    "jagged_none",
    "jagged_sw_serial",
    "jagged_sparse_dist",
    "jagged_prefetch_sparse_dist",
    "jagged_split_sparse_dist",
)
"""Pipelines with the numbers of a plain loop."""


@dataclass
class Sequences(Batch):
    """A batch with jagged labels that counts its tokens, as in recsys-examples."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Sequences:
        return Sequences(**vars(Batch.to(self, device, non_blocking)))

    def num_loss_tokens(self) -> Tensor:
        """Return the number of rows with a loss; it differs between ranks."""
        return has_loss(self).sum().float()


def has_loss(batch: Batch) -> Tensor:
    """Return which rows have a loss."""
    return batch.dense[:, 0] > 0.4


def sequences(count: int, seed: int = 0) -> Iterator[Sequences]:
    """Yield this rank's part of ``count`` batches."""
    for batch in batches(count, seed=seed):
        ones = torch.ones(len(batch.labels), dtype=torch.int64)
        labels = KeyedJaggedTensor.from_lengths_sync(["label"], batch.labels, ones)
        yield Sequences(batch.dense, batch.ids, labels)  # type: ignore[arg-type]


class SequenceModel(Model):
    """A model with one loss per token, and control flow that torch.fx cannot trace."""

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        parts = [self.bottom(batch.dense)]
        if has_loss(batch).any():
            parts += [table(batch.ids).values() for table in self.tables]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        chosen = has_loss(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits[chosen], batch.labels.values()[chosen], reduction="none"
        )
        return losses, (logits.detach(), batch.labels)


def made(megatron: bool = False) -> tuple[Any, Any]:
    """Return a sharded model in torch's DDP or Megatron's wrappers, and its dense optimizer."""
    plain = plain_model(Job())
    plain.__class__ = SequenceModel
    if megatron:
        return megatrons(plain)
    model = sharded(Job(), plain)
    return model, dense_optimizer(Job(), model)


def created(name: str, megatron: bool = False, **options: Any) -> Any:
    """Return a pipeline by name on a new model."""
    model, optimizer = made(megatron)
    return TrainPipelineFactory.create(name, model, optimizer, CPU, **options)


def ran(name: str, data: Iterator[Any], **options: Any) -> list[Tensor]:
    """Return loss, tokens and logits of each step of a pipeline by name."""
    with closing(created(name, **options)) as pipeline:
        return flat(to_the_end(pipeline, data))


def flat(reported: list[Any]) -> list[Tensor]:
    """Return loss, tokens and logits of each step; a step's output is (logits, labels)."""
    return [part for *report, (logits, _) in reported for part in (*report, logits)]


def trained(name: str, steps: int, megatron: bool = False, **options: Any) -> Outcome:
    """Train one of the pipelines on ``count`` batches."""
    with closing(created(name, megatron, **options)) as pipeline:
        outputs = flat(to_the_end(pipeline, sequences(steps)))
        return Outcome(outputs, everything(pipeline._model))


@cache
def by_hand(steps: int, megatron: bool, returns: str) -> Outcome:
    """Train in the loop of recsys-examples, of this version or of the previous one."""
    model, optimizer = made(megatron)
    wrapper = model._dmp_wrapped_module
    ranks = dist.get_world_size()
    outputs: list[Tensor] = []
    for batch in sequences(steps):
        if megatron:
            wrapper.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = batch.num_loss_tokens()
        dist.all_reduce(tokens)
        losses, (logits, _) = model(batch)
        total = torch.sum(losses)
        if returns == "tokens":
            (total * ranks / tokens).backward()
            outputs += [total.detach(), tokens, logits]
        else:
            report = torch.tensor([total.item(), float(losses.size(0))])
            dist.all_reduce(report)
            (total / report[1] * ranks).backward()
            outputs += [report, logits]
        if megatron:
            wrapper.finish_grad_sync()
        optimizer.step()
    return Outcome(outputs, everything(model))
