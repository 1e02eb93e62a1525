"""Stages that run ahead of the model, which the user calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe.tasks.torchrec import (
    EvalPipelineSparseDist,
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
)
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Batch, Job, batches, dense_optimizer, sharded
from tests.tasks.torchrec.models import everything as state_of
from tests.tasks.torchrec.trial import Outcome, by_torchrec, refusal, to_the_end


def _stages(model: Any, prefetch: bool, **more: Any) -> tuple[Any, StagedTrainPipeline]:
    util = SparseDataDistUtil(model, None)
    stages = [
        PipelineStage("copy", lambda batch: batch.to(CPU), None),
        PipelineStage("same", lambda batch: batch, None),
        util.start_sparse_data_dist_stage(),
    ]
    if prefetch:
        util = SparseDataDistUtil(model, None, prefetch_stream=1)
        fill = util.load_prefetch
        stages = [
            util.start_sparse_data_dist_stage(),
            PipelineStage("prefetch", util.prefetch, None, fill_callback=fill),
        ]
    return util, StagedTrainPipeline(stages, **more)


def _step(model: Any, optimizer: Any, batch: Batch) -> Tensor:
    optimizer.zero_grad()
    losses, output = model(batch)
    torch.sum(losses, dim=0).backward()
    optimizer.step()
    return output


def _trained(prefetch: bool) -> list[str]:
    job = Job(modules=2)
    model = sharded(job)
    optimizer = dense_optimizer(job, model)
    util, pipeline = _stages(model, prefetch)
    evaluation = EvalPipelineSparseDist(model, optimizer, CPU)
    outputs, data = [], batches(6)
    while batch := pipeline.progress(data):
        outputs.append(_step(model, optimizer, batch))
        if len(outputs) == 2:
            util.detach()
            with torch.no_grad():
                model(next(batches(1, seed=7)))  # of no pipeline
            model.eval()
            to_the_end(evaluation, batches(2, seed=8))
            model.train()
        if len(outputs) == 3:
            assert len(util._pipelined_modules) == 2
    assert not util._exchanged  # nothing is kept of batches that were used
    found = Outcome(outputs, state_of(model)).differences(by_torchrec(job, batches(6)))
    return found + ([] if pipeline.progress(data) is None else ["a batch after the end"])


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_users_loop_trains_as_torchrecs_base(two_ranks: Ranks, prefetch: bool) -> None:
    """It is equal bit for bit, also with the model called directly or by another pipeline."""
    assert two_ranks.run(_trained, prefetch) == [[], []]


def _plain(count: int, **more: Any) -> tuple[StagedTrainPipeline, Iterator[Tensor]]:
    stages = [PipelineStage(name, lambda rows: rows + 1, None) for name in ("a", "a", "b")]
    return StagedTrainPipeline(stages, **more), iter(torch.arange(10.0, 10.0 + count).view(-1, 1))


def _values(pipeline: StagedTrainPipeline, data: Iterator[Tensor], count: int) -> list[float]:
    return [float(pipeline.progress(data)) for _ in range(count)]


def test_a_flush_finishes_what_is_in_flight() -> None:
    """Then on_flush_end is called, and the same call returns the next batch."""
    told: list[str] = []
    pipeline, data = _plain(8, on_flush_end=lambda: told.append("flushed"))
    assert _values(pipeline, data, 1) == [13.0]
    pipeline.set_flush(True)
    assert _values(pipeline, data, 3) == [14.0, 15.0, 16.0]
    assert next(data) == 14.0  # four batches were read
    assert not told
    assert _values(pipeline, data, 1) == [18.0]
    assert told == ["flushed"]
    assert _values(pipeline, data, 2) == [19.0, 20.0]
    assert pipeline.progress(data) is None
    assert pipeline.num_stages == 3


def test_another_iterator_begins_when_the_one_before_is_done() -> None:
    """No batch is lost, and the first iterator keeps its other batches."""
    pipeline, first = _plain(6)
    second = iter(torch.zeros(2, 1))
    assert _values(pipeline, first, 1) == [13.0]
    assert _values(pipeline, second, 5) == [14.0, 15.0, 16.0, 3.0, 3.0]
    assert pipeline.progress(second) is None
    assert _values(pipeline, first, 1) == [17.0]
    assert [*map(float, pipeline.drain())] == [18.0]


def _misuse() -> list[str]:
    model = sharded(Job())
    _, pipeline = _stages(model, prefetch=False)
    data = chain(batches(5), ["x"])  # no stage takes it
    batch = pipeline.progress(data)
    model(batch)
    other = next(batches(1, seed=9))
    found = [refusal(lambda: model(other))]
    pipeline.progress(data)
    return [*found, refusal(lambda: pipeline.progress(data)), refusal(lambda: model(batch))]


def test_a_batch_that_was_not_exchanged_is_refused(two_ranks: Ranks) -> None:
    """It would train on another batch's embeddings; a failure drops the exchanges, too."""
    for other, failed, again in two_ranks.run(_misuse):
        assert "exchanged" in other
        assert failed.startswith("AttributeError")
        assert "no exchanged batch is left" in again


def test_what_has_no_counterpart_is_refused() -> None:
    """These are foreign callbacks, TorchRec's internals, and look-ups that read stale rows."""
    stage = PipelineStage("mine", lambda rows: rows, None, fill_callback=print)
    said = refusal(lambda: StagedTrainPipeline([stage]))
    assert said.startswith("NotImplementedError: stage 'mine': fill_callback=")
    said = refusal(lambda: SparseDataDistUtil(None, None, embedding_lookup_stream=1))  # type: ignore[arg-type]
    assert "SparseDataDistUtil(embedding_lookup_stream=1)" in said
    assert refusal(lambda: StagedTrainPipeline([], debug_mode=True)).startswith("NotImpl")
    pipeline, _ = _plain(1)
    with pytest.raises(AttributeError, match=r"no '_stage_outputs'.*\.pipe"):
        _ = pipeline._stage_outputs
