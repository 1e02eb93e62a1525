"""Gradients of several batches for one step: TorchRec's numbers, and no batch is forgotten.

The loss was divided by the number of batches, so tables that update themselves moved a fraction as
far; batches left over at the end of the data never reached the dense optimizer; and TorchRec's
wrapper around one of our pipelines did nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.tasks.torchrec import PipelineFactory, TrainStep
from swpipe.tasks.torchrec.accumulation import Accumulation
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import EXACT, Outcome, TrainPipelineBase, to_the_end

from torchrec.distributed import train_pipeline  # isort: skip

with_wrapper = pytest.mark.skipif(
    not hasattr(train_pipeline, "GradientAccumulationWrapper"), reason="newer than this TorchRec"
)


def _wrapped(pipeline: Any, model: nn.Module, optimizer: Any, count: int) -> Any:
    config = train_pipeline.GradientAccumulationConfig(is_enabled=True, num_steps=count)
    return train_pipeline.GradientAccumulationWrapper(pipeline, optimizer, model, config)


def _ours(name: str, model: nn.Module, count: int) -> Any:
    step = TrainStep([dense_optimizer(Job(), model)], accumulate=count)
    return PipelineFactory.create(name, model=model, step=step, device=CPU)


def _as_torchrec(steps: int) -> dict[str, list[str]]:
    model = sharded(Job())
    optimizer = dense_optimizer(Job(), model)
    theirs = _wrapped(TrainPipelineBase(model, optimizer, CPU), model, optimizer, 4)
    wanted = Outcome(to_the_end(theirs, batches(steps)), everything(model))
    found = {}
    for name in EXACT:
        model = sharded(Job())
        with _ours(name, model, 4) as pipeline:
            outcome = Outcome(to_the_end(pipeline, batches(steps)), everything(model))
        if where := outcome.differences(wanted):
            found[name] = where
    return found


@with_wrapper
@pytest.mark.parametrize("steps", [8, 3])
def test_accumulation_is_torchrecs(two_ranks: Ranks, one_rank: Ranks, steps: int) -> None:
    """On one rank with the rest at the end; on two, TorchRec does not reduce that rest."""
    assert one_rank.run(_as_torchrec, steps) == [{}]
    if steps % 4 == 0:
        assert two_ranks.run(_as_torchrec, steps) == [{}, {}]


def _between_evaluations(name: str, parts: tuple[int, ...]) -> dict[str, Tensor]:
    """Train on 8 batches in parts, with an evaluation of 3 batches after each."""
    model = sharded(Job())
    data = batches(8)
    with _ours(name, model, 4) as pipeline:
        for part in parts:
            some = islice(data, part)
            for _ in range(part):  # not to StopIteration, which would take a step with the rest
                pipeline.progress(some)
            model.eval()
            with torch.no_grad():
                to_the_end(pipeline, batches(3, seed=4))
            model.train()
    return everything(model)


def _evaluations_change_nothing(name: str) -> list[str]:
    whole = _between_evaluations(name, (8,))
    parts = _between_evaluations(name, (3, 5))
    return [k for k, v in parts.items() if not torch.equal(v, whole[k])]


@pytest.mark.parametrize("name", EXACT)
def test_an_evaluation_within_an_accumulation_changes_nothing(two_ranks: Ranks, name: str) -> None:
    """Only batches that are trained on count, and ``drain`` does not step."""
    assert two_ranks.run(_evaluations_change_nothing, name) == [[], []]


def _torchrecs_wrapper() -> str:
    model = sharded(Job())
    with _ours("jagged_sparse_dist", model, 1) as pipeline:
        try:
            _wrapped(pipeline, model, pipeline.tasks.step.optimizers[0], 4)
        except RuntimeError as error:
            return str(error)
    return "accepted"


@with_wrapper
def test_torchrecs_wrapper_is_refused_with_ours_named(one_rank: Ranks) -> None:
    """It replaces an attribute that our step does not read."""
    assert "TrainStep(accumulate=n)" in one_rank.run(_torchrecs_wrapper)[0]


def _flush_in_flight() -> str:
    with _ours("jagged_sparse_dist", sharded(Job()), 4) as pipeline:
        pipeline.progress(batches(5))
        try:
            pipeline.flush()
        except RuntimeError as error:
            return str(error)
    return "accepted"


def test_a_flush_with_batches_in_flight_is_refused(one_rank: Ranks) -> None:
    """They belong to the step that would be taken."""
    assert "drain()" in one_rank.run(_flush_in_flight)[0]


def test_steps_begin_and_end_by_trained_batches() -> None:
    """Every third ends one, batches of an evaluation do not count, and a flush begins anew."""
    three = Accumulation(nn.Linear(1, 1), 3)
    assert [k for k in range(7) if three.begins(k)] == [0, 3, 6]
    assert [k for k in range(7) if three.ends(k)] == [2, 5]
    three.skip()  # iteration 7, after one more batch than two steps have
    assert [k for k in range(8, 14) if three.ends(k)] == [9, 12]
    assert three.take_rest(11)
    assert [k for k in range(11, 17) if three.begins(k)] == [11, 14]
    assert not three.take_rest(11)
    always = Accumulation(nn.Linear(1, 1), 1)
    assert always.begins(4)
    assert always.ends(4)
    assert not always.take_rest(5)
