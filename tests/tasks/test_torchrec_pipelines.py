"""TorchRec's pipelines by name: the same loop, with either import."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from swpipe.tasks import torchrec_pipelines as ours
from tests.support.ranks import Ranks
from tests.tasks.sparse_dist.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.sparse_dist.trial import Outcome, by_torchrec, to_the_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

EXACT = (
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
)
"""Pipelines whose numbers are those of a plain loop."""


def _trained(kind: Any, data: Iterator[Batch], *args: Any, **options: Any) -> Outcome:
    model = sharded(Job())
    pipeline = kind(model, dense_optimizer(Job(), model), CPU, *args, **options)
    return Outcome(to_the_end(pipeline, data), everything(model))


def _parity() -> dict[str, list[str]]:
    wanted = by_torchrec(Job(), batches(6))
    found = {}
    for name in EXACT:
        if where := _trained(getattr(ours, name), batches(6)).differences(wanted):
            found[name] = where
    return found


def test_the_numbers_are_those_of_torchrecs_base(two_ranks: Ranks) -> None:
    """Every exact class, at its default arguments."""
    assert two_ranks.run(_parity) == [{}, {}]
