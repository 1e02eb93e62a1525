"""HSTU's pipeline as its users call it; and its factory."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe.errors import PlanError
from swpipe.tasks.torchrec import PipelineFactory
from swpipe.tasks.torchrec.hstu import (
    HSTU_DEFAULT_THREAD_MAP,
    HSTUPipeline,
    HSTUPipelineFactory,
)
from swpipe.tasks.torchrec.recsys_examples.jagged import JaggedPipeline
from tests.tasks.torchrec.hstu.training import batches, made
from tests.tasks.torchrec.models import CPU
from tests.tasks.torchrec.trial import to_the_end

NAMES = ["hstu_prefetch_sparse_dist", "hstu_sparse_dist"]


def _pipeline(**options: Any) -> HSTUPipeline[Any, Any]:
    model, optimizer = made("plain")
    return HSTUPipeline(model, optimizer, CPU, **options)


def test_progress_returns_loss_tokens_and_output() -> None:
    """The sum of the losses, the number of events, and what the model returns."""
    (batch,) = batches(1)
    with _pipeline() as pipe:
        loss, tokens, (logits, labels) = pipe.progress(iter([batch]))
        with pytest.raises(StopIteration):
            pipe.progress(iter([]))
    events = len(batch.times.values())
    assert float(tokens) == events
    assert loss.ndim == 0
    assert logits.shape == labels.shape == (events, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_factory_makes_a_pipeline_by_name(name: str) -> None:
    """With or without the prefetch; its own registry, not that of the eleven tasks' pipelines."""
    assert HSTUPipelineFactory.list() == NAMES
    assert not {*NAMES} & {*PipelineFactory.list()}
    model, optimizer = made("plain")
    with HSTUPipelineFactory.create(
        name, model=model, optimizer=optimizer, device=CPU, thread_map="by_stream"
    ) as pipe:
        assert isinstance(pipe, JaggedPipeline)
        assert len(pipe.schedule.all_tasks()) == (14 if "prefetch" in name else 13)
        assert len(to_the_end(pipe, batches(3))) == 3


def test_after_shutdown_nothing_runs() -> None:
    """Twice is as good as once. Until then a watchdog is called for each batch."""
    called: list[int] = []
    pipe = _pipeline(watchdog=lambda: called.append(1), thread_map=HSTU_DEFAULT_THREAD_MAP)
    to_the_end(pipe, batches(3))
    assert called == [1] * 3
    pipe.shutdown()
    pipe.shutdown()
    with pytest.raises(RuntimeError, match="clos"):
        pipe.progress(batches(2))


def test_what_is_wrong_is_refused_when_the_pipeline_is_made() -> None:
    """A depth, a shuffler, a task's name, and an option that there is not."""
    with pytest.raises(ValueError, match="prefetch_depth is 0"):
        _pipeline(prefetch_depth=0)
    with pytest.raises(TypeError, match="batch_shuffler is a int"):
        _pipeline(batch_shuffler=3)
    with pytest.raises(PlanError, match="thread_map names task 'prefetch'"):
        _pipeline(thread_map={"prefetch": "io"})
    with pytest.raises(TypeError, match="lookahead"):
        _pipeline(lookahead=3)
