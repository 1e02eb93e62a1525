"""A checkpoint with batches in flight is the state after the batches that were returned."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from swpipe.tasks.torchrec import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, everything, sharded
from tests.tasks.torchrec.trial import EXACT, Outcome, TrainPipelineBase, to_the_end

from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip
from torchrec.optim.optimizers import in_backward_optimizer_filter  # isort: skip

JOB = Job(optimizer=torch.optim.Adagrad, modules=2)
SAVED, STEPS = 4, 9


def _made() -> tuple[nn.Module, Any]:
    """A model and all of its optimizers, which have states."""
    model: Any = sharded(JOB)
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(named, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def _by_torchrec() -> Outcome:
    model, optimizer = _made()
    pipeline = TrainPipelineBase(model, optimizer, CPU)
    return Outcome(to_the_end(pipeline, batches(STEPS)), everything(model))


def _resumed(name: str, folder: str) -> dict[str, list[str]]:
    """Where the training that went on differs, and the one that was resumed."""
    wanted = _by_torchrec()
    model, optimizer = _made()
    with (
        warnings.catch_warnings(),
        PipelineFactory.create(name, model=model, optimizer=optimizer, device=CPU) as pipeline,
    ):
        warnings.simplefilter("ignore")  # what torch says of its own checkpoints
        data = batches(STEPS)
        outputs = [pipeline.progress(data) for _ in range(SAVED)]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder)
        outputs += to_the_end(pipeline, data)
        went_on = Outcome(outputs, everything(model))

        other, its_optimizer = _made()
        state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        its_optimizer.load_state_dict(state["optimizer"])
    rest = islice(batches(STEPS), SAVED, None)
    with PipelineFactory.create(name, model=other, optimizer=its_optimizer, device=CPU) as pipeline:
        outputs = outputs[:SAVED] + to_the_end(pipeline, rest)
    resumed = Outcome(outputs, everything(other))
    found = {"went on": went_on.differences(wanted), "resumed": resumed.differences(wanted)}
    return {what: where for what, where in found.items() if where}


@pytest.mark.parametrize("name", EXACT)
def test_a_checkpoint_in_flight_is_resumed_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """By ``torch.distributed.checkpoint``, of the tables, the rest, and all optimizers."""
    assert two_ranks.run(_resumed, name, str(tmp_path)) == [{}, {}]
