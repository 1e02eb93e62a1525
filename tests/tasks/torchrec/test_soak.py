"""Long trainings, interrupted wherever it is awkward: nothing piles up, and no number changes."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.tasks.torchrec import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome

PIPELINES = (
    "jagged_sparse_dist",
    "jagged_prefetch_sparse_dist",
    "jagged_split_sparse_dist",
)


def _parts(steps: int) -> Iterator[tuple[str, int]]:
    """What is done in turn, and on how many batches; the same on every rank."""
    draws = random.Random(5)
    while steps > 0:
        what = draws.choice(["train", "train", "eval", "detach"])
        count = min(draws.choice([0, 1, 2, 3, 4, 7, 19]), steps)
        yield what, count
        steps -= count if what == "train" else 0


def _evaluate(model: nn.Module, data: Iterator[Batch]) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        outputs = [model(batch)[1] for batch in data]
    model.train()
    return outputs


def _plainly(steps: int) -> Outcome:
    """The same training and the same evaluations, one batch after the other."""
    job = Job()
    model = sharded(job)
    optimizer = dense_optimizer(job, model)
    data, outputs = batches(steps), []
    for k, (what, count) in enumerate(_parts(steps)):
        if what != "train":
            outputs += _evaluate(model, batches(count, seed=k + 1))
            continue
        for batch in islice(data, count):
            optimizer.zero_grad()
            loss, logits = model(batch)
            loss.backward()
            optimizer.step()
            outputs.append(logits)
    return Outcome(outputs, everything(model))


def _through(pipeline: Any, data: Iterator[Batch]) -> list[Tensor]:
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(data))
        except StopIteration:
            return outputs


def _piped(name: str, steps: int) -> tuple[Outcome, list[int]]:
    """Through a pipeline; and the highest memory so far (KiB) after each tenth of the way."""
    job = Job()
    model = sharded(job)
    data, outputs, peaks = batches(steps), [], []
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(job, model), device=CPU
    ) as pipeline:
        for k, (what, count) in enumerate(_parts(steps)):
            if what == "train":
                outputs += _through(pipeline, islice(data, count))
            elif what == "eval":
                model.eval()
                with torch.no_grad():
                    outputs += _through(pipeline, batches(count, seed=k + 1))
                model.train()
            else:
                outputs += _evaluate(pipeline.detach(), batches(count, seed=k + 1))
            if len(outputs) * 10 // steps > len(peaks):
                gc.collect()
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return Outcome(outputs, everything(model)), peaks


def _soaked(name: str, steps: int) -> tuple[list[str], list[int]]:
    outcome, peaks = _piped(name, steps)
    return outcome.differences(_plainly(steps)), peaks


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_awkward_ends_and_switches_change_no_number(two_ranks: Ranks, name: str) -> None:
    """Iterators shorter than the depth, empty ones, evaluations both ways, in between."""
    for where, _ in two_ranks.run(_soaked, name, 25):
        assert where == []


def _peaks(name: str, steps: int) -> list[int]:
    return _piped(name, steps)[1]


@pytest.mark.slow
def test_memory_stays_flat_over_many_steps(two_ranks: Ranks) -> None:
    """After the first third nothing grows by more than the allocator's noise."""
    for peaks in two_ranks.run(_peaks, PIPELINES[1], 150, deadline_s=170):
        assert peaks[-1] - peaks[len(peaks) // 3] < 4 * 1024
